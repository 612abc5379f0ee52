"""A cancelled prompt is hung up on while it is read, then sent again, all in one measured block."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from hearth.commands.bench.measuring import Activity, Taken
from hearth.commands.bench.results import ModelFacts
from hearth.commands.bench.server import Server
from hearth.commands.bench.servers.started_server import StartedServer
from hearth.commands.bench.workload import SCALES, Measured, Visit
from hearth.commands.bench.workloads.counted_tokens import cancelled
from hearth.commands.replay.player import Row, Target
from hearth.commands.replay.traces import Captured
from hearth.commands.stream_client import Outcome, Reading, Tokens

TTFT_S = 0.02  # of the whole prompt: it is hung up on after 9 ms
IDS = [1] * 100


class HangingServer(StartedServer):
    """A server that never ends what it is asked first, where it `hangs`; else it answers."""

    def __init__(self, *, hangs: bool, error: str = "") -> None:
        super().__init__(Target("http://127.0.0.1:1"))
        self.hangs = hangs
        self.error = error
        self.asked: list[tuple[str, bool]] = []  # each prompt, and whether it was measured
        self.blocks = 0  # that were measured
        self.is_measured = False

    async def ask(self, visit: Visit, rows: Sequence[Captured]) -> list[Row]:
        (row,) = rows
        prompt = str(row.body)
        is_new = prompt not in {each for each, _ in self.asked}
        self.asked.append((prompt, self.is_measured))
        if self.hangs and is_new and len(self.asked) > 1:
            await asyncio.Event().wait()
        tokens = Tokens(len(IDS), 0, len(IDS), 1, "")
        outcome = Outcome(200, tokens, TTFT_S, TTFT_S, self.error, Reading())
        return [Row(0, "some", "chat", outcome, IDS)]

    @contextlib.asynccontextmanager
    async def measuring(self, visit: Visit) -> AsyncIterator[Taken]:
        self.blocks += 1
        self.is_measured = True
        taken = Taken(Activity(None))
        yield taken
        taken.found = {"read_tokens": 200.0}
        self.is_measured = False


def played(server: HangingServer, monkeypatch: pytest.MonkeyPatch) -> Measured:
    monkeypatch.setattr(cancelled, "ask", server.ask)
    monkeypatch.setattr(cancelled, "measuring", server.measuring)
    facts = ModelFacts("tiny", "text", "qwen3", 1)
    visit = Visit(Server("some"), server, facts, SCALES["quick"], 0)
    at_once = next(each for each in cancelled.WORKLOADS if each.name == "cancel-0s")
    return asyncio.run(at_once.run(visit))


def test_each_prompt_is_new_hung_up_on_and_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HangingServer(hangs=True)
    found = played(server, monkeypatch)
    whole, *rest = [prompt for prompt, _ in server.asked]
    assert len(rest) == 2 * cancelled.CANCELS[0] and whole not in rest
    assert rest[::2] == rest[1::2] and len(set(rest)) == cancelled.CANCELS[0]
    assert server.blocks == 2, "the whole prompt is measured for nobody, then all is in one block"
    assert all(is_measured for _, is_measured in server.asked)
    assert found.errors == ()
    assert (found.values["requests"], found.values["read_tokens"]) == (cancelled.CANCELS[0], 200)


def test_an_answer_that_comes_before_it_is_cancelled_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = played(HangingServer(hangs=False), monkeypatch)
    assert found.errors == ("2 of 2 were answered before they were cancelled",)
    assert found.values["failed"] == 0


def test_a_server_that_does_not_answer_the_whole_prompt_is_not_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = HangingServer(hangs=False, error="no")
    found = played(server, monkeypatch)
    assert len(server.asked) == 1 and found.errors == ("no",)
    assert found.values == {"failed": cancelled.CANCELS[0]}
