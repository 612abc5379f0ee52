"""A client that gives up and asks again, for ever: each time it must get further."""

import math
import os
import re
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import httpx
import pytest

from tests.helpers.clients.run_clients import MODEL
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.worker_processes.scripted_worker import SMALL_TALK

CHUNK: Final = 256  # tokens of a prefill on a CPU
TEXT: Final = "What are words? Ask the book that nobody has read. "
ENDED: Final = re.compile(r"finished request=(\S+) reason=(\S+) .*cached=(\d+) prefilled=(\d+)")
TRIES_MAX: Final = 60


@dataclass(frozen=True)
class Try:
    """One request as the worker's log tells its end."""

    reason: str
    cached: int  # tokens that were there when it began
    prefilled: int  # that it added

    @property
    def reached(self) -> int:
        return self.cached + self.prefilled


def tries(server: ScriptedServer, since: int) -> list[Try]:
    """Return the requests that have ended, but for the first `since`."""
    rows = ENDED.findall(server.log.read_text())[since:]
    return [Try(reason, int(cached), int(prefilled)) for _, reason, cached, prefilled in rows]


def insist(server: ScriptedServer, body: dict[str, Any], patience_s: float) -> tuple[str, int]:
    """Ask until there is an answer, each time for `patience_s`; return it and how often."""
    with httpx.Client(base_url=server.url) as client:
        for number in range(1, TRIES_MAX + 1):
            try:
                reply = client.post("/v1/chat/completions", json=body, timeout=patience_s)
            except httpx.ReadTimeout:
                continue
            assert reply.status_code == 200, reply.text
            return str(reply.json()["choices"][0]["message"]["content"]), number
    raise AssertionError(f"no answer in {TRIES_MAX} tries:\n{server.log.read_text()[-4000:]}")


def every_retry_goes_on(server: ScriptedServer, prefill_s: float, patience_s: float) -> list[Try]:
    """Have a prompt of `prefill_s` asked for by a client of `patience_s`; return its tries.

    How often it asks depends on the machine; that nothing is read twice does not.
    """
    path, text = f"{server.url}/v1/messages/count_tokens", f"{patience_s:g} s: {TEXT * 400}"
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 99}
    size = httpx.post(path, json=body, timeout=60).json()["input_tokens"]
    before = len(tries(server, 0))
    server.pause(prefill_s / math.ceil(size / CHUNK))
    try:
        began = time.monotonic()
        answer, count = insist(server, body, patience_s)
        took_s = time.monotonic() - began
    finally:
        server.pause(0)
    assert answer == SMALL_TALK
    ended = tries(server, before)
    print(f"{size} tokens, {prefill_s:g} s of prefill, {count} tries in {took_s:.1f} s: {ended}")
    # An answer may be on its way while its client gives up: what comes then is a repeat.
    whole = next(number for number, each in enumerate(ended) if each.reached == size)
    mine, repeats = ended[: whole + 1], ended[whole + 1 :]
    assert count >= len(ended), "one that was given up while it was rendered is not in the log"
    assert len(mine) >= 3
    assert [each.reason for each in mine[:-1]] == ["cancelled"] * whole
    assert mine[0].cached == 0
    assert all(late.cached == early.reached for early, late in pairwise(mine))
    assert sum(each.prefilled for each in mine) == size, "no token was read twice"
    assert all(each.prefilled < CHUNK for each in repeats)
    return ended


def test_who_cancels_and_retries_for_ever_is_answered_and_nothing_is_read_twice(
    scripted: ScriptedServer,
) -> None:
    every_retry_goes_on(scripted, prefill_s=6.0, patience_s=1.0)


@pytest.mark.skipif("HEARTH_EXAMPLES" not in os.environ, reason="half a minute")
def test_who_cancels_after_2_s_still_finishes_a_prompt_that_needs_20_s(
    scripted: ScriptedServer,
) -> None:
    ended = every_retry_goes_on(scripted, prefill_s=20.0, patience_s=2.0)
    assert len(ended) >= 8
