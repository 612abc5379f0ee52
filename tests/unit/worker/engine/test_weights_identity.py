"""Attacks what tells weights apart: files are changed, swapped and linked unseen."""

import functools
import json
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hearth.shared.settings import load_settings
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.engine import weights_identity
from hearth.worker.engine.model_loader import load_model
from hearth.worker.engine.weights_identity import (
    FILES_MAX,
    MEMORY_NAME,
    FileStamp,
    HashMemory,
    WeightsIdentity,
    hash_file,
    stamp_of,
)
from hearth.worker.setup.kv_setup import cache_root, identify
from scripts.fixtures.fixture_cache import fixture_dir

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
HOUR_NS = 3_600_000_000_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of two shards of one size."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"rope_theta": 10000.0, "quantization": {"bits": 4}}')
    (directory / FIRST).write_bytes(b"first " * 1000)
    (directory / SECOND).write_bytes(b"other " * 1000)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def memory(tmp_path: Path) -> HashMemory:
    return HashMemory(tmp_path / "kv")


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were written a moment ago are remembered too."""
    monkeypatch.setattr(weights_identity, "SETTLED_NS", -1)
    monkeypatch.setattr(weights_identity, "COARSE_NS", 1 << 80)


def in_place(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change a file's content and give it the times of before, as rsync and cp can."""
    before = path.stat()
    with path.open("r+b") as file:
        content = change(file.read())
        file.seek(0)
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def change_a_weight(model: Path) -> None:
    in_place(model / FIRST, lambda content: content[:-1] + b"!")


def swap_two_shards(model: Path) -> None:
    (model / FIRST).rename(model / "aside")
    (model / SECOND).rename(model / FIRST)
    (model / "aside").rename(model / SECOND)


def change_the_rope(model: Path) -> None:
    in_place(model / "config.json", lambda text: text.replace(b"10000.0", b"20000.0"))


def add_an_adapter(model: Path) -> None:
    (model / "adapters.safetensors").write_bytes(b"low rank")


def turn_a_link(model: Path) -> None:
    """The name, the size and the time of writing stay; what it leads to is another file."""
    before = (model / FIRST).stat()
    other = model.parent / "blob"
    other.write_bytes(b"FIRST " * 1000)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    (model / FIRST).unlink()
    (model / FIRST).symlink_to(other)


def change_code(model: Path) -> None:
    (model / "modeling.py").write_text("scale = 2")


@pytest.mark.parametrize(
    "attack",
    [
        *(change_a_weight, swap_two_shards, change_the_rope, add_an_adapter),
        *(turn_a_link, change_code),
    ],
)
def test_weights_that_changed_behind_the_servers_back_are_others(
    model: Path, memory: HashMemory, attack: Callable[[Path], None]
) -> None:
    before = WeightsIdentity(model, memory).parts()
    assert WeightsIdentity(model, memory).parts() == before
    attack(model)
    assert WeightsIdentity(model, memory).parts() != before


def test_what_decides_no_kv_does_not_count(model: Path, memory: HashMemory) -> None:
    before = WeightsIdentity(model, memory).parts()
    (model / "tokenizer.json").write_text('{"other": 1}')
    (model / "README.md").write_text("of no account")
    os.utime(model / FIRST)
    assert WeightsIdentity(model, memory).parts() == before


def test_a_file_is_read_once_and_only_what_changed_is_read_again(
    model: Path, memory: HashMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(path: str, is_over: Callable[[], bool]) -> str | None:
        read.append(Path(path).name)
        return hash_file(path, is_over)

    monkeypatch.setattr(weights_identity, "hash_file", counted)
    WeightsIdentity(model, memory).parts()
    assert sorted(read) == ["config.json", FIRST, SECOND]
    WeightsIdentity(model, memory).parts()
    assert len(read) == 3, "all is remembered"
    change_a_weight(model)
    WeightsIdentity(model, memory).parts()
    assert read[3:] == [FIRST]


@pytest.mark.parametrize("name", ["SETTLED_NS", "COARSE_NS"])
def test_a_file_whose_next_change_may_leave_its_stamp_is_not_remembered(
    model: Path, memory: HashMemory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(weights_identity, name, {"SETTLED_NS": HOUR_NS, "COARSE_NS": 1}[name])
    WeightsIdentity(model, memory).parts()
    assert memory.load() == {}


def test_weights_that_change_while_they_are_loaded_are_nobodys(
    model: Path, memory: HashMemory
) -> None:
    names = set()
    for _ in range(2):
        identity = WeightsIdentity(model, memory)
        change_a_weight(model)
        names.add(identity.parts())
    assert len(names) == 2, "the same bytes, and yet another name each time"
    assert {Path(at.path).name for at in memory.load()} == {"config.json", SECOND}


def test_nothing_is_hashed_where_no_kv_outlives_the_process(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_identity, "hash_file", None)
    before = WeightsIdentity(model, None, is_hashed=False).parts()
    assert WeightsIdentity(model, None, is_hashed=False).parts() == before
    change_a_weight(model)
    assert WeightsIdentity(model, None, is_hashed=False).parts() != before


def test_a_start_that_ends_waits_for_no_hash(model: Path) -> None:
    with pytest.raises(SystemExit):
        WeightsIdentity(model, None, is_over=lambda: True).parts()


def test_a_worker_whose_weights_changed_in_place_with_their_times_restored_has_another_root(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "weights"
    shutil.copytree(fixture_dir("qwen3"), directory)
    environ = {"MODEL_PATH": str(directory), "KV_CACHE_DIR": str(tmp_path / "kv")}
    settings = load_settings(environ, None)

    def root() -> PrefixHash:
        told = functools.partial(identify, settings, lambda: False)
        return cache_root(load_model(settings, identify=told), settings)

    before = root()
    assert root() == before
    (weights,) = directory.glob("*.safetensors")
    in_place(weights, lambda content: content[:-2_000] + bytes(2_000))
    assert root() != before, "so that no KV of before is found"


# ---------------------------------------------------------------- the memory


def test_the_memory_is_its_owners_alone(model: Path, memory: HashMemory, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        WeightsIdentity(model, memory).parts()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "kv" / MEMORY_NAME).stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "kv").iterdir()] == [MEMORY_NAME]


@pytest.mark.parametrize("how", ["open to others", "a link elsewhere", "another user's"])
def test_hashes_that_another_user_could_have_planted_are_not_believed(
    model: Path, memory: HashMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    honest = WeightsIdentity(model, memory).parts()
    path = tmp_path / "kv" / MEMORY_NAME
    lie = dict.fromkeys(memory.load(), "00" * 16)
    memory.add(lie)
    assert memory.load() == lie, "our own file is believed"
    if how == "open to others":
        path.chmod(0o620)
    elif how == "a link elsewhere":
        path.rename(path.with_name("planted"))
        path.symlink_to("planted")
    else:
        another = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: another)
    assert memory.load() == {}
    assert WeightsIdentity(model, memory).parts() == honest


ROW = ["/m", 1, 2, 3, 4, "ab" * 16]


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"schema": 1}', '{"schema": 9, "files": []}', "[" * 100_000),
        json.dumps({"schema": 1, "files": [[*ROW[:5], "zz" * 16]]}),
        json.dumps({"schema": 1, "files": [ROW[:5]]}),
        json.dumps({"schema": 1, "files": [[*ROW[:4], "4", ROW[5]]]}),
        json.dumps({"schema": 1, "files": [[*ROW[:4], True, ROW[5]]]}),
        json.dumps({"schema": 1, "files": [None]}),
        json.dumps({"schema": 1, "files": [[7, *ROW[1:]]]}),
        " " * (1 << 21),
    ],
)
def test_a_damaged_memory_is_none_and_the_files_are_hashed_again(
    model: Path, memory: HashMemory, tmp_path: Path, content: str
) -> None:
    honest = WeightsIdentity(model, memory).parts()
    (tmp_path / "kv" / MEMORY_NAME).write_text(content)
    assert memory.load() == {}
    assert WeightsIdentity(model, memory).parts() == honest
    assert len(memory.load()) == 3, "and it is whole again"


def test_what_several_servers_remember_stands_together_within_bounds(
    model: Path, memory: HashMemory, tmp_path: Path
) -> None:
    WeightsIdentity(model, memory).parts()
    HashMemory(tmp_path / "kv").add({FileStamp("/elsewhere", 1, 2, 3, 4): "cd" * 16})
    assert len(memory.load()) == 4
    memory.add({FileStamp(f"/{n}", 1, 2, 3, 4): "ef" * 16 for n in range(FILES_MAX)})
    assert len(memory.load()) == FILES_MAX and stamp_of(model / FIRST) not in memory.load()


def test_a_directory_that_takes_no_file_costs_a_hash_at_each_start_and_no_more(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    memory = HashMemory(tmp_path / "file")
    assert WeightsIdentity(model, memory).parts() == WeightsIdentity(model, memory).parts()


def test_a_stamp_tells_a_change_once_it_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    now = time.time_ns()
    assert FileStamp("/m", 1, 2, now - HOUR_NS | 1, 4).shows_changes
    assert not FileStamp("/m", 1, 2, now, 4).shows_changes, "it may change within this very tick"
    coarse = (now - HOUR_NS) // 10_000_000 * 10_000_000
    assert not FileStamp("/m", 1, 2, coarse, 4).shows_changes, "exFAT knows no time of change"
