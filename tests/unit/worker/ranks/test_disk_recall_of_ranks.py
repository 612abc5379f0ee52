"""Conversations over ranks go on from disk after a restart, whatever a rank's files have met."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.file_names import SUFFIX
from hearth.worker.disk.file_store import FileStore
from hearth.worker.prompt.prefill_cuts import CutRule
from scripts.harness.socketless_worker import CHUNK, Machine, loaded, marks
from scripts.harness.store_builders import ROOT
from tests.helpers.models.by_day import by_day
from tests.helpers.ranks.replica_ranks import (
    ReplicaRanks,
    check_followed,
    ranked_machine,
)

NAMES = ("qwen3", "qwen3_5", "gpt_oss")
BYTES_MAX = 1 << 30
QUEUE_BYTES = 1 << 28
FLUSH_S = 20.0

Told = list[tuple[int, list[int]]]  # cached tokens and the answer, of each request


class RankedWorkers:
    """One worker of several ranks after another, on one directory a rank."""

    def __init__(self, directory: Path, name: str, size: int) -> None:
        self._directory, self._name, self._size = directory, name, size
        self._label = CutRule(CHUNK, marks(name)).label
        self.ranks: ReplicaRanks | None = None

    def start(self) -> Machine:
        model = loaded(self._name, tiny=True)
        self.ranks = ReplicaRanks(model, self._size, self._store)
        thread = self.ranks.disk_thread(self._store(0, ROOT, self._label), QUEUE_BYTES)
        made = ranked_machine(self._name, self.ranks, model, disk_thread=thread)
        self._worker = made
        return made

    def stop(self) -> None:
        """End the worker as one ends that is told to: what is not on disk is written."""
        assert self.ranks is not None
        self._worker.keeper.hand_over()
        assert self._worker.keeper.disk.thread.flush(FLUSH_S)
        self.end()

    def check_followed(self) -> None:
        """Assert that each rank holds what rank 0 holds, once nothing waits to be written."""
        assert self.ranks is not None
        thread = self._worker.keeper.disk.thread
        assert thread.flush(FLUSH_S) and self.ranks.flush(FLUSH_S)
        thread.close()  # which lets go of what was written last
        check_followed(self._worker, self.ranks)

    def end(self) -> None:
        if self.ranks is not None:
            self._worker.keeper.disk.thread.close()
            self.ranks.settle()
            self.ranks.close()
            self.ranks = None

    def files(self, rank: int) -> list[Path]:
        return sorted((self._directory / str(rank)).glob(f"*/*{SUFFIX}"))

    def _store(self, rank: int, root: PrefixHash, label: str) -> FileStore:
        return FileStore(self._directory / str(rank), root, BYTES_MAX, 0, rule=label)


@pytest.fixture(params=by_day(NAMES))
def workers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RankedWorkers]:
    made = RankedWorkers(tmp_path, request.param, 2)
    yield made
    made.end()


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 2000) for _ in range(count)]


def talk(worker: Machine) -> Told:
    """Go on with a talk of three turns, and ask two things that begin as it does."""
    told: Told = []
    prompt = words(1, 300)
    for turn in range(3):
        answer = worker.ask(prompt, 5)
        told.append((answer.cached, answer.tokens))
        prompt = prompt + answer.tokens + words(turn, 90)
    for fork in range(2):
        answer = worker.ask(words(1, 280) + words(50 + fork, 70), 4)
        told.append((answer.cached, answer.tokens))
    worker.check()
    return told


def answers(told: Told) -> list[list[int]]:
    return [tokens for _, tokens in told]


def spoil(path: Path, how: int) -> None:
    """Lose a file, or leave some of it, or change a bit of its last byte."""
    content = bytearray(path.read_bytes())
    if how == 0:
        path.unlink()
    elif how == 1:
        path.write_bytes(content[: len(content) // 2])
    else:
        content[-1] ^= 1
        path.write_bytes(content)


def test_whatever_files_a_rank_has_lost_or_damaged_the_answers_are_the_same(
    workers: RankedWorkers,
) -> None:
    rng = random.Random(7)
    first = talk(workers.start())
    workers.stop()
    names = [[path.name for path in workers.files(rank)] for rank in range(2)]
    assert names[0] and names[0] == names[1]
    for rank in range(2):
        found = workers.files(rank)
        for path in rng.sample(found, len(found) // 3):
            spoil(path, rng.randrange(3))
    again = workers.start()
    assert answers(talk(again)) == answers(first)
    workers.check_followed()
    workers.stop()
    restarted = workers.start()
    last = talk(restarted)
    assert answers(last) == answers(first)
    cached = [sum(tokens for tokens, _ in told) for told in (first, last)]
    assert cached[1] >= cached[0], "what was read anew was written anew"
    assert restarted.keeper.disk.counts["recalled_tokens"] > 0, "it goes on from the files"


def test_an_emptied_cache_is_empty_on_every_rank(workers: RankedWorkers) -> None:
    worker = workers.start()
    talk(worker)
    worker.scheduler.forget()
    assert worker.ask(words(1, 300), 4).cached == 0
    workers.end()
