"""A worker killed at any line of a round of drafts leaves a disk that is as good as before."""

import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from hypothesis import given, strategies as st

from hearth.worker.engine.decode import decoding_sequence
from hearth.worker.kv import layer_adapters
from hearth.worker.schedule.answer_drafts import DraftPolicy
from scripts.harness.slow_properties import slow
from scripts.harness.socketless_worker import Answer, Machine, machine
from scripts.harness.warm.warm_talks import KINDS, TOKENS_MAX, Talk
from tests.helpers.models.oracle_drafts import OracleDrafts
from tests.helpers.worker.disk_workers import Workers

ROUND_FILES = {str(module.__file__) for module in (decoding_sequence, layer_adapters)}
TAKES_BACK = ("RewindPoint", "_move", "_cut")  # what of the layer adapters is of a round
LIES = st.sampled_from([0.0, 0.3, 1.0])
LENGTHS = st.sampled_from([[4], [7, 0, 1], [3, 5, 0]])


@contextmanager
def at_each_line_of_a_round(do: Callable[[int], None]) -> Iterator[list[str]]:
    """Call `do` with the number of each line of what drafts, verifies and takes back, before it.

    Yield the functions that the lines are of, as they come.
    """
    lines: list[str] = []

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in ROUND_FILES:
            return None
        is_adapter = code.co_filename == layer_adapters.__file__
        if is_adapter and not code.co_qualname.startswith(TAKES_BACK):
            return None
        if event == "line":
            do(len(lines))
            lines.append(frame.f_code.co_name)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


class DraftedLife:
    """A worker over a directory whose answers are drafted for, and a cold one to compare with."""

    def __init__(self, name: str, lies: float, lengths: list[int], chance: random.Random) -> None:
        self._name, self._lies, self._lengths = name, lies, lengths
        cold = machine(name, keeps=False)
        cold.drafts.policy = DraftPolicy()
        self.talk = Talk(name, None, cold)
        self.opening = self.talk.opening(chance)
        said = self.talk.expected(self.opening).tokens
        self.second = self.talk.turn(chance, self.opening, said)
        said = self.talk.expected(self.second).tokens
        self.third = self.talk.turn(chance, self.second, said)

    def start(self, workers: Workers) -> Machine:
        drafts = OracleDrafts(lambda ids: self.talk.expected(ids).tokens, self._lies, self._lengths)
        return workers.start(self._name, drafts=drafts)

    def live(self, directory: Path, at_line: Callable[[int], None]) -> list[str]:
        """Answer two turns; return the functions of the lines that the second goes through."""
        workers = Workers(directory)
        try:
            warm = self.start(workers)
            self.talk.compare(warm.ask(self.opening, TOKENS_MAX), self.opening, False)
            warm.work_ahead()
            workers.flush()
            with at_each_line_of_a_round(at_line) as lines:
                answer = warm.ask(self.second, TOKENS_MAX)
            self.talk.compare(answer, self.second, False)
            return lines
        finally:
            workers.kill()

    def answers_after(self, directory: Path) -> list[tuple[Answer, list[int]]]:
        """Return what the next worker says, with the prompts, where the one before was killed."""
        workers = Workers(directory)
        try:
            warm = self.start(workers)
            answers = [(warm.ask(ids, TOKENS_MAX), ids) for ids in (self.second, self.third)]
            warm.check()
            counts = workers.file_store.report()["counts"]
            assert not [each for each in counts if each.startswith("damaged_")], counts
            return answers
        finally:
            workers.kill()


def copy_at_once(source: Path, target: Path) -> None:
    """Copy the files as they are at one moment: again where the disk's thread renames one."""
    while not target.exists():
        try:
            shutil.copytree(source, target)
        except shutil.Error:
            shutil.rmtree(target)


@slow(3)
@given(st.sampled_from(KINDS), LIES, LENGTHS, st.integers(0, 10**6))
def test_a_worker_killed_at_any_line_of_a_round_goes_on_as_a_cold_one_would(
    name: str, lies: float, lengths: list[int], seed: int
) -> None:
    chance = random.Random(seed)
    life = DraftedLife(name, lies, lengths, chance)
    with TemporaryDirectory() as folder:
        lines = life.live(Path(folder, "counted"), lambda _line: None)
        assert lines.count("_accepted_path") > 3, "drafts are verified there"
        killed_at = sorted(chance.sample(range(len(lines)), 4))

        def kill(line: int) -> None:
            # The files as they are at this moment are what SIGKILL leaves.
            if line in killed_at:
                copy_at_once(Path(folder, "lived"), Path(folder, f"killed-{line}"))

        life.live(Path(folder, "lived"), kill)
        for line in killed_at:
            for answer, ids in life.answers_after(Path(folder, f"killed-{line}")):
                life.talk.compare(answer, ids, False)
                assert answer.cached > len(life.opening) // 2, "what was on disk is not read again"
