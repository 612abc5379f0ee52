"""Makes visits of `hearth bench` without a server: what is asked is noted and answered at once."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import ModuleType

import pytest

from hearth.commands.bench.measuring import Activity, Taken
from hearth.commands.bench.results import ModelFacts
from hearth.commands.bench.server import Memory, Meter, Server
from hearth.commands.bench.servers.started_server import StartedServer
from hearth.commands.bench.workload import SCALES, Visit
from hearth.commands.replay.player import Row, Target
from hearth.commands.replay.traces import Captured
from hearth.commands.stream_client import Outcome, Reading, Tokens

IDS = (1, 2, 3, 4)  # of every prompt


class IdleServer(StartedServer):
    """A server of which nobody asks anything."""

    def __init__(self) -> None:
        super().__init__(Target("http://127.0.0.1:1"))
        self.is_metered = True
        self.start_s = 2.5

    def meter(self) -> Meter | None:
        return Meter(0.0, 0.0)

    def pids(self) -> list[int]:
        return []


def made_visit(url: str = "", scale: str = "quick") -> Visit:
    told = {Memory.ONE_SESSION: ("--memory", "{memory_mb}")}
    server = Server("hearth", url=url, memory_arguments=told)
    return Visit(server, IdleServer(), ModelFacts("m", "text", "qwen3", 1), SCALES[scale], 0)


def answered(
    text: str = "", prompt: int = 100, prefilled: int = 100, ids: Sequence[int] | None = IDS
) -> Row:
    """Return how an answered request went."""
    tokens = Tokens(prompt, prompt - prefilled, prefilled, 1, "")
    reading = Reading(text=[text], is_complete=True)
    return Row(0, "t", "chat", Outcome(200, tokens, 0.1, 0.2, "", reading), ids)


def refused(error: str = "503 full") -> Row:
    return Row(0, "t", "chat", Outcome.refused(503, error), None)


@dataclass
class Played:
    """What a workload has asked, with what it was allowed to say; and what the meter is to tell."""

    rows: list[list[Captured]] = field(default_factory=list)
    tokens_max: list[int] = field(default_factory=list)
    answer: Callable[[Captured], Row] = field(default=lambda _: answered())
    found: dict[str, float] = field(default_factory=lambda: {"read_tokens": 7.0, "wall_s": 1.0})
    measured: list[list[Captured]] = field(default_factory=list)  # what was asked in the block

    def put_in(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> "Played":
        """Stand in for asking and measuring in `modules`."""
        for module in modules:
            for name, stands in (("ask", self._ask), ("measuring", self._measuring)):
                monkeypatch.setattr(module, name, stands, raising=False)
        return self

    async def _ask(
        self,
        visit: Visit,
        rows: Sequence[Captured],
        *,
        tokens_max: int = 1,
        is_live: bool = False,
        is_serial: bool = False,
    ) -> list[Row]:
        self.rows.append(list(rows))
        self.tokens_max.append(tokens_max)
        return [self.answer(row) for row in rows]

    @asynccontextmanager
    async def _measuring(self, visit: Visit) -> AsyncIterator[Taken]:
        taken, before = Taken(Activity(None)), len(self.rows)
        yield taken
        self.measured += self.rows[before:]
        taken.found = dict(self.found)
