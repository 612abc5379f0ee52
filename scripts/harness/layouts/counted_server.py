"""Runs a counted worker on a Mac, and another after it on the same disk: a server that restarts."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from hearth.worker.cache.block_hash import Tokens, pack
from hearth.worker.prompt.prefill_cuts import TurnMarks
from scripts.harness.layouts.counted_disk import Disk
from scripts.harness.layouts.counted_engine import CountedEngine, Speed
from scripts.harness.layouts.counted_worker import CountedWorker, counted, settings_of
from scripts.harness.layouts.model_layouts import ModelLayout
from scripts.harness.layouts.session_scripts import SessionScript, Turn
from scripts.harness.layouts.simulated_clock import SimulatedClock
from scripts.harness.mac.mac_hardware import Mac

SHARED_MEMORY: Final = Path("/dev/shm")  # files that are holes are made fastest there
UNHEARD: Final = (7, 7, 7, 7)  # tokens that nobody has sent before
ANSWER: Final = 7

# One Mac a size of memory, with the bytes of memory that it reads in a second and the operations
# that it computes, both about as published.
MACS: Final = {
    16: (Mac("M2", 16), Speed(100e9, 5e12)),
    32: (Mac("M5", 32), Speed(153e9, 15e12)),
    48: (Mac("M4 Pro", 48), Speed(273e9, 15e12)),
    64: (Mac("M1 Max", 64), Speed(400e9, 18e12)),
    128: (Mac("M5 Max", 128), Speed(600e9, 60e12)),
    512: (Mac("M3 Ultra", 512), Speed(819e9, 50e12)),
}


class CountedServer:
    """One model on one Mac. Invariant: at most one worker at a time; `disk` outlives it.

    Owner: the thread that simulates.
    """

    def __init__(
        self,
        layout: ModelLayout,
        memory_gb: int,
        marks: TurnMarks,
        directory: Path,
        settings: Mapping[str, str],
    ) -> None:
        self.layout = layout
        self.mac, self._speed = MACS[memory_gb]
        self.clock, self.disk = SimulatedClock(), Disk()
        self.settings = settings_of(directory, settings)
        self._marks = marks

    def start(self) -> CountedWorker:
        """Start a worker. Raises StartError where the model does not fit."""
        engine = CountedEngine(self.layout, self._speed, self.clock)
        return CountedWorker(self.layout, self.clock, engine, self.settings, self._marks)


@contextlib.contextmanager
def serving(
    layout: ModelLayout, memory_gb: int, marks: TurnMarks, settings: Mapping[str, str]
) -> Iterator[CountedServer]:
    """Yield a server on an empty disk; within the block the project's parts count."""
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with TemporaryDirectory(dir=place) as directory:
        server = CountedServer(layout, memory_gb, marks, Path(directory), settings)
        with counted(server.mac, server.clock, server.disk):
            yield server


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a live cache holds, and the prompt that is sent after a restart: it begins with that."""

    tokens: Tokens
    asked: Tokens

    @classmethod
    def whole(cls, tokens: Tokens) -> "Held":
        """Of a conversation that goes on behind all of it."""
        return cls(tokens, np.concatenate([tokens, pack(UNHEARD)]))


def read_again(worker: CountedWorker, held: Sequence[Held], marks: TurnMarks) -> list[int]:
    """Send these prompts; return how many of the tokens that were held are read again."""
    found = []
    for number, each in enumerate(held):
        turn = Turn(
            ids=each.asked.tolist(),
            tokens=each.asked,
            answer=[ANSWER],
            waits_for=(),
            gap_s=0.0,
            family="",
            asker="",
            is_side=False,
            next_tokens=None,
        )
        worker.play(SessionScript(f"probe-{number}", (turn,), marks))
        usage = worker.ends[-1].usage
        assert usage is not None, "what was held fits"
        found.append(max(0, usage.prefilled_tokens - (len(each.asked) - len(each.tokens))))
    return found
