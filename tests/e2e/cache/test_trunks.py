"""Answers over HTTP whose prompts begin alike share one trunk, which is read once.

That each says what it says alone is tests/unit/worker/engine/decode's.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.by_day import by_day
from tests.helpers.servers.server import WAIT_S_MAX, Server, until

Body = dict[str, Any]

COMMON: Final = " ".join(
    f"The rule of case {number} is to read what was written before it." for number in range(100)
)
COMMON_TOKENS_MIN: Final = 1_500
SEVERAL: Final = 4
TOKENS: Final = 300  # of an answer: long enough that all are seen to decode together
READ: Final = re.compile(r" finished request=.* prefilled=(\d+) ")
OWN_TOKENS_MAX: Final = 64  # of a prompt behind what it has in common with others


def body_of(last: str, choices: int = 1) -> Body:
    """Return a request behind the common beginning; its answer takes all its tokens."""
    config = json.loads((fixture_dir("qwen3") / "config.json").read_text())
    said = [{"role": "system", "content": COMMON}, {"role": "user", "content": last}]
    never = {str(end_id): -100 for end_id in config["eos_token_id"]}
    return {"messages": said, "max_tokens": TOKENS, "n": choices, "logit_bias": never}


ASKED: Final = {
    "choices": [("Say it.", SEVERAL)],
    "agents": [(f"You are agent {number}. {'Go on. ' * number}", 1) for number in range(SEVERAL)],
}


def ask(server: Server, body: Body) -> Body:
    """Return the usage of an answer."""
    told = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S_MAX)
    return dict(told.raise_for_status().json()["usage"])


def on_one_trunk(server: Server) -> Body:
    """Return what the worker tells, once all stand on trunks."""
    (worker,) = server.get("/v1/cache")["workers"]
    return dict(worker) if worker["trunks"]["rows"] == SEVERAL else {}


def read_tokens(server: Server) -> list[int]:
    """Return how many prompt tokens the worker read for each answer so far, each choice one."""
    return [int(count) for count in READ.findall(server.log.read_text())]


@pytest.mark.parametrize("who", by_day(ASKED, ["agents"]))
def test_those_who_are_asked_at_once_share_one_trunk_which_is_read_once(
    server: Server, who: str
) -> None:
    server.forget()
    before = len(read_tokens(server))
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(ask, server, body_of(*asked)) for asked in ASKED[who]]
        worker = until(lambda: on_one_trunk(server))
        usages = [each.result() for each in running]
    trunk_bytes = worker["trunks"]["spared_bytes"] / (SEVERAL - 1)
    assert worker["trunks"]["count"] == 1
    # Copies would take SEVERAL times the trunk. How long the tails are by now is chance.
    assert trunk_bytes <= worker["batch_bytes"] < 3 * trunk_bytes
    first, *others = sorted(read_tokens(server)[before:], reverse=True)
    assert len(others) == SEVERAL - 1 and first >= COMMON_TOKENS_MIN
    assert max(others) <= OWN_TOKENS_MAX, others
    cached = sorted(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached[0] == 0 and all(count >= COMMON_TOKENS_MIN for count in cached[1:])
    assert sum(usage["completion_tokens"] for usage in usages) == SEVERAL * TOKENS
