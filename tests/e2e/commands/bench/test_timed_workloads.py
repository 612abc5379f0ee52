"""The timed workloads on real servers, and on servers that stream as badly as some do."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.results import ModelFacts
from hearth.commands.bench.server import Memory, Server
from hearth.commands.bench.servers.known_servers import SERVERS
from hearth.commands.bench.servers.started_server import StartedServer, started
from hearth.commands.bench.workload import SCALES, Measured, Visit
from hearth.commands.bench.workloads import beside_long, streams, structured
from hearth.commands.bench.workloads.decode_cost import Decoded, decoded, warm_up
from hearth.commands.bench.workloads.timed_stream import timed_client
from hearth.commands.replay.player import Target
from scripts.fixtures.fixture_cache import fixture_dir

SCALE = replace(SCALES["quick"], long_tokens=1_500)
MODEL = ModelFacts("tiny", "text", "qwen3", 1)
TRIES_MAX = 5  # on a busy machine answers that are asked for at once may come one after another


def visit_of(server: Server, running: StartedServer) -> Visit:
    return Visit(server, running, MODEL, SCALE, 0)


# ---------------------------------------------------------------- real servers


@dataclass(frozen=True)
class Course:
    """What one real server did."""

    one: Decoded
    same: Decoded  # the same question once more: it is drafted where answers are
    four: Decoded
    own: tuple[float, float]  # forwards that Hearth itself counted for `one` and for `same`
    plans: Measured
    long: Measured


async def own_forwards(running: StartedServer) -> float:
    """Return the forwards that Hearth has counted for answers; 0 of another server."""
    target = running.target
    key = {"authorization": f"Bearer {target.key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{target.base_url}/metrics", headers=key) as response,
    ):
        lines = (await response.text()).splitlines()
    found = [line for line in lines if line.startswith("hearth_decode_forwards_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in found)


async def course(name: str, model: str, home: Path) -> Course:
    server = SERVERS[name]
    path = fixture_dir(model, tiny=True)
    async with started(server, path, home, Memory.DEFAULT, 64) as running:
        visit = visit_of(server, running)
        async with timed_client(visit) as client:
            await warm_up(visit, client)
            counts, single = [await own_forwards(running)], []
            for _ in range(2):
                asked = streams.questions("a", 1, 0)
                single.append(await decoded(visit, client, asked, 32, {}))
                counts.append(await own_forwards(running))
            for attempt in range(TRIES_MAX):
                four = await decoded(visit, client, streams.questions("b", 4, attempt), 64, {})
                if four.values().get("forwards_per_token", 2.0) < 1.0:
                    break
        plans = await structured.run_structured(visit)
        long = await beside_long.run_beside_long(visit)
    own = counts[1] - counts[0], counts[2] - counts[1]
    return Course(single[0], single[1], four, own, plans, long)


@pytest.fixture(scope="module")
def hearth(tmp_path_factory: pytest.TempPathFactory) -> Course:
    return asyncio.run(course("hearth", "qwen3_5", tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")
def mlx_lm(tmp_path_factory: pytest.TempPathFactory) -> Course:
    return asyncio.run(course("mlx_lm", "qwen3", tmp_path_factory.mktemp("home")))


def test_hearths_forwards_are_those_that_it_counts_itself(hearth: Course) -> None:
    # Its own count has no forward that reads a prompt, but one for the first token of an answer.
    first_tokens = 3
    for done, own in zip((hearth.one, hearth.same), hearth.own, strict=True):
        assert done.errors() == () and done.new.tokens == done.again.tokens == 1
        assert done.whole.forwards is not None and done.again.forwards is not None
        counted = done.whole.forwards - done.again.forwards
        assert counted == own - first_tokens and 0 < counted <= done.whole.tokens - 1
    assert hearth.own[1] < hearth.own[0], "what was said before is drafted"


def test_mlx_lm_computes_one_token_in_a_forward(mlx_lm: Course) -> None:
    one = mlx_lm.one
    assert one.errors() == () and one.again.tokens == 1 and one.whole.tokens > 8
    assert one.values()["forwards_per_token"] == 1.0, "it drafts nothing"


@pytest.mark.parametrize("server", ["hearth", "mlx_lm"])
def test_answers_in_a_batch_share_forwards(server: str, request: pytest.FixtureRequest) -> None:
    done: Course = request.getfixturevalue(server)
    values = done.four.values()
    assert values["requests"] == 12 and values["failed"] == 0 and set(values) <= set(MEASURES)
    assert 0 < values["forwards_per_token"] < 1.0
    assert values["tokens_s"] > 0
    if "gap_p50_s" in values:  # on a busy machine all of an answer may come in one read
        assert values["gap_p99_s"] >= values["gap_p50_s"] > 0
    assert values["ttft_p95_s"] >= values["ttft_p50_s"] > 0
    assert values["memory_bytes"] > 0


def test_a_server_that_ignores_the_schema_shows_it(hearth: Course, mlx_lm: Course) -> None:
    assert hearth.plans.errors == mlx_lm.plans.errors == ()
    assert hearth.plans.values["valid_share"] == 1.0
    assert mlx_lm.plans.values["valid_share"] == 0.0


@pytest.mark.parametrize("server", ["hearth", "mlx_lm"])
def test_a_long_prompt_is_read_beside_streams(server: str, request: pytest.FixtureRequest) -> None:
    done: Course = request.getfixturevalue(server)
    values = done.long.values
    assert done.long.errors == () and set(values) <= set(MEASURES)
    assert values["prompt_tokens"] == pytest.approx(SCALE.long_tokens, rel=0.1)
    assert values["ttft_p50_s"] > 0 and values["gap_p99_s"] >= values["gap_p50_s"] > 0
    assert values["gap_over_alone"] > 0


# ---------------------------------------------------------------- servers that stream badly

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
STEP_S = 0.002


def chunk(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


async def stream(request: web.Request, bundle: int, tokens: int, *, has_usage: bool = True) -> Any:
    """Answer with one token a step, `bundle` of them in an event."""
    response = web.StreamResponse()
    await response.prepare(request)

    async def send(event: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())

    for done in range(1, tokens + 1):
        await asyncio.sleep(STEP_S)
        if done % bundle == 0:
            await send(chunk("a" * bundle))
    await send(chunk("", "length"))
    if has_usage:
        told = {"prompt_tokens": 40, "completion_tokens": tokens}
        await send({"choices": [], "usage": told})
    return response


async def bundling(request: web.Request) -> Any:
    return await stream(request, 8, (await request.json())["max_tokens"])


async def late(request: web.Request) -> Any:
    """Send all text at the end."""
    tokens = (await request.json())["max_tokens"]
    return await stream(request, tokens, tokens)


async def short(request: web.Request) -> Any:
    return await stream(request, 1, min(9, (await request.json())["max_tokens"]))


async def untold(request: web.Request) -> Any:
    return await stream(request, 1, (await request.json())["max_tokens"], has_usage=False)


async def refusing(request: web.Request) -> Any:
    return web.Response(text="no model", status=400)


def asked_of(handler: Handler, run: Callable[[Visit], Awaitable[Measured]]) -> Measured:
    """Return what a workload finds of a server that answers with `handler`."""

    async def go() -> Measured:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            port = runner.addresses[0][1]
            url = f"http://127.0.0.1:{port}"
            server = Server("other", url=url)
            target = Target(url, model="m", timeout_s=60)
            return await run(visit_of(server, StartedServer(target)))
        finally:
            await runner.cleanup()

    return asyncio.run(go())


def streams_of(count: int) -> Callable[[Visit], Awaitable[Measured]]:
    return lambda visit: streams.run_streams(count, visit)


@pytest.mark.parametrize(("handler", "arrivals_max"), [(bundling, 4), (late, 1)])
def test_tokens_are_those_of_the_usage_not_of_the_events(
    handler: Handler, arrivals_max: int
) -> None:
    async def ask(visit: Visit) -> Measured:
        async with timed_client(visit) as client:
            answer = await client.ask("?", 32, {})
        assert answer.error == "" and answer.completion == 32 and answer.is_full(32)
        assert 1 <= len(answer.arrivals_s) <= arrivals_max
        assert answer.ttft_s is not None and answer.ttft_s > STEP_S
        return Measured({})

    asked_of(handler, ask)
    values = asked_of(handler, streams_of(2)).values
    assert values["requests"] == 6 and "forwards_per_token" not in values, "it has no meter"
    assert ("gap_p50_s" in values) is (handler is bundling), "one event has no gap"


def test_short_answers_are_told_and_not_compared() -> None:
    found = asked_of(short, streams_of(2))
    assert found.errors == (f"2 of 2 answers ended early, in {streams.TRIES_MAX} tries",)
    assert "tokens_s" not in found.values and found.values["failed"] == 0


@pytest.mark.parametrize(
    ("handler", "error"),
    [(untold, "the stream told no usage"), (refusing, "400 no model")],
)
def test_a_server_that_fails_is_told_by_each_workload(handler: Handler, error: str) -> None:
    found = asked_of(handler, streams_of(2))
    assert found.errors == (error,) and found.values["failed"] == 6
    plans = asked_of(handler, structured.run_structured)
    assert plans.values["valid_share"] == 0.0 and plans.errors == (error,)
    long = asked_of(handler, beside_long.run_beside_long)
    assert long.values == {"failed": 1}
