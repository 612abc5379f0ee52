"""A damaged file of the SSD tier is a counted miss: the answer is the one a cold cache gives."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hearth.worker.disk.file_format import Record
from hearth.worker.disk.file_store import FileStore
from scripts.harness.socketless_worker import Answer, machine
from tests.helpers.by_day import by_day
from tests.helpers.records.disk_records import OTHER_ROOT
from tests.helpers.worker.disk_workers import TEXT, Workers, prompt

SEED = 7


def truncated(path: Path, other: Path, chance: random.Random) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(chance.choice([0, 7, size // 2, size - 1]))


def flipped(path: Path, other: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    bit = chance.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def flipped_at_the_end(path: Path, other: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def swapped(path: Path, other: Path, chance: random.Random) -> None:
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def lengthened(path: Path, other: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + bytes(64))


def foreign(path: Path, other: Path, chance: random.Random) -> None:
    path.write_bytes(b"not a record of anybody's")


DAMAGES = [truncated, flipped, flipped_at_the_end, swapped, lengthened, foreign]
Damage = Callable[[Path, Path, random.Random], None]


class Reading(FileStore):
    """A file store that remembers which files were asked for."""

    def get(self, name: Any) -> Record | None:
        self.asked = [*getattr(self, "asked", []), name.file_name]
        return super().get(name)


class Scene:
    """What a worker left of one conversation, and how the next prompt is answered cold."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.left = directory / "left"
        self._place = directory / "place"
        first = prompt(name, TEXT)
        workers = Workers(self.left)
        workers.start(name, is_exact=True).ask(first)
        workers.flush()
        workers.kill()
        self.asked = prompt(name, TEXT, "And then?")
        self.cold = machine(name, keeps=False, is_exact=True).ask(self.asked)
        shutil.copytree(self.left, self._place)  # what answers also writes
        warm, file_store = self.answer(self._place)
        self.same(warm)
        assert warm.cached > 200
        self.read = file_store.asked
        assert len(self.read) >= 3

    def answer(self, directory: Path) -> tuple[Answer, Reading]:
        workers = Workers(directory, Reading)
        try:
            answer = workers.start(self.name, is_exact=True).ask(self.asked)
        finally:
            workers.kill()
        file_store = workers.file_store
        assert isinstance(file_store, Reading)
        return answer, file_store

    def same(self, answer: Answer) -> None:
        assert answer.tokens == self.cold.tokens
        for one, other in zip(answer.logits, self.cold.logits, strict=True):
            assert np.array_equal(one, other)

    def damaged(self, file_name: str, damage: Damage, chance: random.Random) -> None:
        """Damage one file of a copy; the answer must not change, and the damage be counted."""
        shutil.rmtree(self._place, ignore_errors=True)
        shutil.copytree(self.left, self._place)
        (path,) = self._place.rglob(file_name)
        other = chance.choice([p for p in path.parent.glob("*.safetensors") if p != path])
        damage(path, other, chance)
        answer, file_store = self.answer(self._place)
        self.same(answer)
        what = f"{damage.__name__} {file_name}"
        counts = file_store.report()["counts"]
        found = sum(count for name, count in counts.items() if name.startswith("damaged_"))
        assert found >= 1, (what, counts)
        again, _ = self.answer(self._place)  # what was damaged is gone, or has been written anew
        self.same(again)


@pytest.fixture(scope="module", params=by_day(["qwen3", "qwen3_5", "gemma3_text"], ["qwen3_5"]))
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("damage"), request.param)


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_file_damaged_in_turn_changes_no_answer_and_is_counted(
    scene: Scene, damage: Damage
) -> None:
    chance = random.Random(SEED)
    for file_name in scene.read:
        scene.damaged(file_name, damage, chance)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What another model has left, under another root and then under ours."""
    directory = tmp_path_factory.mktemp("other")
    workers = Workers(directory)
    workers.start("llama", OTHER_ROOT, is_exact=True).ask(prompt("qwen3", TEXT))
    workers.flush()
    workers.kill()
    yield directory


def test_another_models_files_under_our_names_change_no_answer(
    scene: Scene, other_model: Path, tmp_path: Path
) -> None:
    """As if somebody had copied them: their names say tokens, not whose KV it is."""
    place = tmp_path / "place"
    shutil.copytree(scene.left, place)
    theirs = {path.name: path for path in other_model.rglob("*.safetensors")}
    ours = list(place.rglob("*.safetensors"))
    for number, path in enumerate(sorted(ours)):
        path.write_bytes(sorted(theirs.values())[number % len(theirs)].read_bytes())
    answer, file_store = scene.answer(place)
    scene.same(answer)
    counts = file_store.report()["counts"]
    assert any(name.startswith("damaged_") for name in counts), counts
