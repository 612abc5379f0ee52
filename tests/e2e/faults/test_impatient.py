"""A client that gives up and asks again, for ever: each time it must get further."""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import httpx

from tests.helpers.clients.run_clients import MODEL
from tests.helpers.servers.leaving_clients import Leaving
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.servers.server import WAIT_S_MAX, until
from tests.helpers.worker_processes.scripted_worker import SMALL_TALK

PATH: Final = "/v1/chat/completions"
TEXT: Final = "What are words? Ask the book that nobody has read. " * 400
ENDED: Final = re.compile(r"finished request=\S+ reason=(\S+) .*cached=(\d+) prefilled=(\d+)")
CHUNK_S: Final = 0.3  # so that a client sees a prefill before it is over
LEAVES: Final = 3


@dataclass(frozen=True)
class Try:
    """One request as the worker's log tells its end."""

    reason: str
    cached: int  # tokens that were there when it began
    prefilled: int  # that it added

    @property
    def reached(self) -> int:
        return self.cached + self.prefilled


def tries(server: ScriptedServer) -> list[Try]:
    rows = ENDED.findall(server.log.read_text())
    return [Try(reason, int(cached), int(prefilled)) for reason, cached, prefilled in rows]


def give_up(server: ScriptedServer, body: dict[str, Any], done: int) -> None:
    """Ask, and leave once more of the prompt was read than `done`."""
    client, ended = Leaving(server, PATH, body), len(tries(server))
    until(lambda: any(row["done_tokens"] > done for row in server.health().get("prefills", [])))
    client.leave()
    until(lambda: len(tries(server)) > ended)


def test_who_cancels_and_retries_for_ever_is_answered_and_nothing_is_read_twice(
    scripted: ScriptedServer,
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 99}
    counted = httpx.post(f"{scripted.url}/v1/messages/count_tokens", json=body, timeout=WAIT_S_MAX)
    size, before = counted.json()["input_tokens"], len(tries(scripted))
    scripted.pause(CHUNK_S)
    try:
        for _ in range(LEAVES):
            reached = [each.reached for each in tries(scripted)[before:]]
            give_up(scripted, body, max(reached, default=0))
    finally:
        scripted.pause(0)
    reply = httpx.post(scripted.url + PATH, json=body, timeout=WAIT_S_MAX).raise_for_status()
    assert reply.json()["choices"][0]["message"]["content"] == SMALL_TALK
    mine = tries(scripted)[before:]
    assert [each.reason for each in mine] == ["cancelled"] * LEAVES + ["stop"]
    assert mine[0].cached == 0 and mine[-1].reached == size
    assert all(late.cached == early.reached for early, late in pairwise(mine))
    assert sum(each.prefilled for each in mine) == size, "no token was read twice"
