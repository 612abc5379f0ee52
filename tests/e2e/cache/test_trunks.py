"""Answers over HTTP whose prompts begin alike share one trunk, and say what each says alone."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import WAIT_S_MAX, Server

Body = dict[str, Any]

COMMON: Final = " ".join(
    f"The rule of case {number} is to read what was written before it." for number in range(100)
)
COMMON_TOKENS_MIN: Final = 1_500
SEVERAL: Final = 4
TOKENS: Final = 300  # of an answer: long enough that all are seen to decode together
POLL_S: Final = 0.02
SAME_CHARACTERS_MIN: Final = 40
READ: Final = re.compile(r" finished request=.* prefilled=(\d+) ")
OWN_TOKENS_MAX: Final = 64  # of a prompt behind what it has in common with others
HOW: Final = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.8, "seed": 11}}


@pytest.fixture(scope="module")
def end_ids() -> list[int]:
    config = json.loads((fixture_dir("qwen3") / "config.json").read_text())
    return list(config["eos_token_id"])


def body_of(last: str, end_ids: Sequence[int], **more: Any) -> Body:
    """Return a streamed request behind the common beginning; its answer takes all its tokens."""
    said = [{"role": "system", "content": COMMON}, {"role": "user", "content": last}]
    return {
        **{"model": "local", "messages": said, "max_tokens": TOKENS, "stream": True},
        **{"stream_options": {"include_usage": True}},
        "logit_bias": {str(end_id): -100 for end_id in end_ids},
        **more,
    }


def choices(end_ids: Sequence[int], how: Body) -> list[Body]:
    return [body_of("Say it.", end_ids, n=SEVERAL, **how)]


def agents(end_ids: Sequence[int], how: Body) -> list[Body]:
    return [
        body_of(f"You are agent {number}. {'Go on. ' * number}", end_ids, **how)
        for number in range(SEVERAL)
    ]


ASKED: Final[dict[str, Callable[[Sequence[int], Body], list[Body]]]] = {
    "choices": choices,
    "agents": agents,
}


def one_by_one(body: Body) -> Iterator[Body]:
    """Yield the requests for each choice alone. The server counts a seed up by choice."""
    for choice in range(body.get("n", 1)):
        yield body | {"n": 1} | ({"seed": body["seed"] + choice} if "seed" in body else {})


@dataclass
class Told:
    """What a stream has told so far."""

    texts: dict[int, str] = field(default_factory=dict)  # by choice
    usage: Body = field(default_factory=dict)


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S_MAX) as client:
        yield client


async def ask(client: httpx.AsyncClient, body: Body, told: Told | None = None) -> Told:
    """Send a request and read its stream to the end, into `told`."""
    told = told if told is not None else Told()
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            row = json.loads(line.removeprefix("data: "))
            for choice in row["choices"]:
                delta = choice["delta"]
                text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                told.texts[choice["index"]] = told.texts.get(choice["index"], "") + text
            told.usage = row.get("usage") or told.usage
    return told


async def worker_of(client: httpx.AsyncClient) -> Body:
    (worker,) = (await client.get("/v1/cache")).json()["workers"]
    return dict(worker)


async def until(
    client: httpx.AsyncClient, rows: int, running: Sequence[asyncio.Task[Told]]
) -> Body:
    """Return what the worker tells once so many answers stand on trunks."""
    while (worker := await worker_of(client))["trunks"]["rows"] != rows:
        assert not all(task.done() for task in running), f"never {rows} rows: {worker['trunks']}"
        await asyncio.sleep(POLL_S)
    return worker


def read_tokens(server: Server) -> list[int]:
    """Return how many prompt tokens the worker read for each answer so far, each choice one."""
    return [int(count) for count in READ.findall(server.log.read_text())]


async def alone(server: Server, bodies: Sequence[Body]) -> list[str]:
    """Return what is said where each is asked when the one before it has ended."""
    async with client_of(server) as client:
        asked = [each for body in bodies for each in one_by_one(body)]
        return [(await ask(client, body)).texts[0] for body in asked]


def assert_read_once(counts: Sequence[int]) -> None:
    """Assert that one read the common beginning, and the others their own tokens only."""
    first, *others = sorted(counts, reverse=True)
    assert len(counts) == SEVERAL
    assert first >= COMMON_TOKENS_MIN and all(count <= OWN_TOKENS_MAX for count in others), counts


def assert_same_words(said: Sequence[str], expected: Sequence[str]) -> None:
    """Assert that answers are equal, but for one that may part from what is expected at a tie.

    In another batch sums are in another order, which moves logits by some 1e-5, and who joins when
    is chance: of thousands of tokens a pair may lie closer than that.
    """
    parted = [pair for pair in zip(said, expected, strict=True) if pair[0] != pair[1]]
    assert len(parted) <= 1, parted
    for one, other in parted:
        assert one[:SAME_CHARACTERS_MIN] == other[:SAME_CHARACTERS_MIN]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("who", ASKED)
def test_those_who_are_asked_at_once_share_one_trunk_and_say_what_each_says_alone(
    server: Server, end_ids: list[int], who: str, how: str
) -> None:
    bodies = ASKED[who](end_ids, HOW[how])

    async def together() -> tuple[Body, list[Told]]:
        async with client_of(server) as client:
            running = [asyncio.create_task(ask(client, body)) for body in bodies]
            worker = await until(client, SEVERAL, running)
            return worker, await asyncio.gather(*running)

    server.forget()
    before = len(read_tokens(server))
    worker, told = asyncio.run(together())
    trunk_bytes = worker["trunks"]["spared_bytes"] / (SEVERAL - 1)
    assert worker["trunks"]["count"] == 1
    # Copies would take SEVERAL times the trunk. How long the tails are by now is chance.
    assert trunk_bytes <= worker["batch_bytes"] < 3 * trunk_bytes
    assert_read_once(read_tokens(server)[before:])
    usages = [each.usage for each in told]
    cached = sorted(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached[0] == 0 and all(count >= COMMON_TOKENS_MIN for count in cached[1:])
    assert sum(usage["completion_tokens"] for usage in usages) == SEVERAL * TOKENS
    server.forget()
    said = [each.texts[index] for each in told for index in sorted(each.texts)]
    assert_same_words(said, asyncio.run(alone(server, bodies)))
    distinct = len(set(said))
    assert distinct <= 2 if (who, how) == ("choices", "greedy") else distinct == SEVERAL
