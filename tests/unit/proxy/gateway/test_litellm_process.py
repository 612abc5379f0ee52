"""Drives the pinned LiteLLM in its process: choices, pinned calls, failures, leaving, its end."""

import asyncio
import contextlib
import json
import os
import signal
import stat
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
import yaml

from hearth.proxy.gateway import litellm_process
from hearth.proxy.gateway.cloud.cloud_failure import CloudFailure
from hearth.proxy.gateway.config.routing_table import Deployment, RoutingTable, read_table
from hearth.proxy.gateway.litellm_messages import PATHS
from hearth.proxy.gateway.litellm_process import (
    CONFIG_NAME,
    SOCKET_NAME,
    LiteLLMProcess,
    LiteLLMUnavailable,
)
from hearth.proxy.http.event_loop import SuspendingEventLoop
from hearth.shared.errors import RequestError
from hearth.shared.settings_from_env import load_settings
from tests.helpers.cloud import cloud_answers as says
from tests.helpers.cloud.cloud_answers import CloudAnswer, CloudError
from tests.helpers.servers.mock_cloud import MockCloud

pytestmark = pytest.mark.process
WRONG_KEY: Final = "sk-wrong-0123456789abcdef"
DIALECTS: Final = ("chat", "messages", "responses")
STOPS: Final = "The server is shutting down."
T = TypeVar("T")


def config_of(cloud: MockCloud) -> dict[str, Any]:
    def entry(name: str, model: str, **more: Any) -> dict[str, Any]:
        base = cloud.url if model.startswith("anthropic/") else f"{cloud.url}/v1"
        parameters = {"model": model, "api_base": base, "api_key": cloud.key, **more}
        return {"model_name": name, "litellm_params": parameters}

    return {
        "model_list": [
            entry("chat", "openai/gpt-x"),
            entry("responses", "openai/gpt-x"),
            entry("messages", "anthropic/claude-x"),
            entry("two", "openai/first"),
            entry("two", "openai/second"),
            entry("mixed", "openai/first"),
            {"model_name": "mixed", "litellm_params": {"model": "hearth/smollm2"}},
            entry("acme/*", "openai/*"),
            entry("wrong", "openai/gpt-x", api_key=WRONG_KEY),
            entry("pricey", "openai/gpt-x", max_budget=1e-9, budget_duration="1d")
            | {"model_info": {"input_cost_per_token": 1.0, "output_cost_per_token": 1.0}},
        ],
        "router_settings": {"num_retries": 0, "disable_cooldowns": True},
    }


@dataclass
class Started:
    """LiteLLM's process, the loop that asks it, and the cloud behind it."""

    cloud: MockCloud
    process: LiteLLMProcess
    table: RoutingTable
    runner: asyncio.Runner
    config_mode: int = 0

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def choose(self, group: str, **more: Any) -> Deployment:
        return self.run(self.process.choose(group, request={"metadata": {}}, **more))

    def refused(self, group: str, **more: Any) -> str:
        with pytest.raises(RequestError) as caught:
            self.choose(group, **more)
        assert caught.value.status == 503
        return caught.value.code

    async def ask(
        self, deployment: Deployment, dialect: Any, *, stream: bool
    ) -> tuple[int, bytes, CloudFailure | None]:
        body = json.dumps(body_of(dialect, deployment.group, stream=stream)).encode()
        async with self.process.call(deployment, PATHS[dialect], body, []) as call:
            status, _ = await call.start()
            data = b"" if call.failure else b"".join([part async for part in call.chunks()])
            return status, data, call.failure


def body_of(dialect: str, group: str, *, stream: bool) -> dict[str, Any]:
    if dialect == "responses":
        return {"model": group, "input": "hi", "stream": stream}
    talk = {"model": group, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    return talk | ({"max_tokens": 100} if dialect == "messages" else {})


def table_in(directory: Path, config: dict[str, Any]) -> RoutingTable:
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    settings = load_settings({"RUN_DIR": str(directory)}, None)
    return read_table(path, settings, dict(os.environ), {})


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    directory = tmp_path_factory.mktemp("litellm")
    with MockCloud() as cloud, asyncio.Runner(loop_factory=SuspendingEventLoop) as runner:
        table = table_in(directory, config_of(cloud))
        found = Started(cloud, LiteLLMProcess(table, directory), table, runner)
        found.config_mode = runner.run(begin(found.process, directory / CONFIG_NAME))
        yield found
        runner.run(found.process.close())


async def begin(process: LiteLLMProcess, config: Path) -> int:
    """Return the mode of the config while LiteLLM loads."""
    process.start(lambda usage: None)
    while not config.exists():
        await asyncio.sleep(0)
    mode = stat.S_IMODE(config.stat().st_mode)
    (await process.line()).close()
    return mode


@pytest.fixture(autouse=True)
def _forgotten(started: Started) -> None:
    started.cloud.forget()


def test_its_files_are_this_users_and_no_config_is_left_behind(started: Started) -> None:
    assert started.process.is_usable and started.config_mode == 0o600
    directory = started.table.config.path.parent
    assert not (directory / CONFIG_NAME).exists()
    assert stat.S_IMODE((directory / SOCKET_NAME).stat().st_mode) == 0o600


def test_the_router_chooses_among_what_is_not_excluded(started: Started) -> None:
    first, second = started.table.deployments("two")
    assert {started.choose("two").id for _ in range(40)} == {first.id, second.id}
    assert started.choose("two", excluded={first.id}) == second
    assert {started.choose("two", preferred=first.id).id for _ in range(20)} == {first.id}
    assert started.choose("two", preferred=first.id, excluded={first.id}) == second
    assert started.refused("two", excluded={first.id, second.id}) == "no_deployment"
    cloud, local = started.table.deployments("mixed")
    assert started.choose("mixed", excluded={cloud.id}) == local and local.local == "smollm2"
    assert started.choose("smollm2").local == "smollm2"
    assert started.refused("gone") == "no_deployment"


def test_two_calls_at_once_keep_the_deployments_they_are_pinned_to(started: Started) -> None:
    first, second = started.table.deployments("two")

    async def both() -> None:
        calls = [started.ask(row, "chat", stream=True) for row in (first, second) * 5]
        assert all(failure is None for _, _, failure in await asyncio.gather(*calls))

    started.run(both())
    models = [request.model for request in started.cloud.generations()]
    assert sorted(models) == ["first"] * 5 + ["second"] * 5


def test_a_name_of_a_pattern_reaches_the_model_that_it_names(started: Started) -> None:
    group = started.table.pattern_group("acme/my-model")
    assert group is not None
    assert started.run(started.ask(started.choose(group), "chat", stream=True))[0] == 200
    assert [request.model for request in started.cloud.generations()] == ["my-model"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_answer_comes_in_the_clients_dialect(
    started: Started, dialect: str, stream: bool
) -> None:
    (deployment,) = started.table.deployments(dialect)
    status, data, failure = started.run(started.ask(deployment, dialect, stream=stream))
    assert status == 200 and failure is None
    assert (b"event: " in data or b"data: " in data) == stream
    assert b"cloud" in data
    (request,) = started.cloud.generations()
    assert "authorization" not in request.headers or "sk-mock" in request.headers["authorization"]


FAILURES: list[tuple[CloudError, str]] = [
    (says.INVALID, "client"),
    (says.CONTEXT_LENGTH, "context_window"),
    (says.PROMPT_TOO_LONG, "context_window"),
    (says.RATE_LIMIT, "error"),
    (says.SERVER_ERROR, "error"),
    (says.OVERLOADED, "error"),
    (CloudError(400, "Your credit balance is too low to access the API."), "error"),
]
# Of another Hearth, whose words LiteLLM does not know; it names the code in OpenAI's shape alone.
HEARTHS_OWN = CloudError(
    400,
    "The prompt is 180,008 tokens and this server accepts 131,071.",
    code="context_length_exceeded",
)
BLOCKED = CloudError(400, "Output blocked by content filtering policy")


def cases() -> Iterator[tuple[str, CloudError, str]]:
    for dialect in DIALECTS:
        yield from ((dialect, error, kind) for error, kind in FAILURES)
    yield "chat", HEARTHS_OWN, "context_window"
    yield "chat", says.CONTENT_POLICY, "content_policy"
    yield "responses", says.CONTENT_POLICY, "content_policy"
    yield "messages", BLOCKED, "content_policy"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("dialect", "error", "kind"), list(cases()), ids=lambda value: getattr(value, "message", value)
)
def test_a_failure_before_the_answer_is_told_by_its_kind(
    started: Started, dialect: str, error: CloudError, kind: str, stream: bool
) -> None:
    started.cloud.rule = lambda request: CloudAnswer(error=error)
    (deployment,) = started.table.deployments(dialect)
    status, data, failure = started.run(started.ask(deployment, dialect, stream=stream))
    assert failure is not None and data == b""
    assert failure.status == status >= 400
    assert failure.kind == kind, failure


def test_the_operators_wrong_key_is_no_mistake_of_the_client_and_is_not_told(
    started: Started,
) -> None:
    (deployment,) = started.table.deployments("wrong")
    status, _, failure = started.run(started.ask(deployment, "chat", stream=False))
    assert failure is not None and (status, failure.kind) == (401, "error")
    assert WRONG_KEY not in failure.text and "Incorrect API key" in failure.text


def test_a_stream_that_breaks_off_is_told_at_its_end(started: Started) -> None:
    started.cloud.say(CloudAnswer(drops="amid the text"))
    (deployment,) = started.table.deployments("chat")
    status, data, failure = started.run(started.ask(deployment, "chat", stream=True))
    assert status == 200 and b'"error"' in data
    assert failure is not None and failure.kind == "error"


LEAVES = [(dialect, True, "amid the text") for dialect in DIALECTS] + [
    (dialect, stream, "before the head") for dialect in DIALECTS for stream in (True, False)
]


@pytest.mark.parametrize(("dialect", "stream", "place"), LEAVES)
def test_a_client_that_leaves_ends_the_clouds_request(
    started: Started, dialect: Any, stream: bool, place: Any
) -> None:
    started.cloud.say(CloudAnswer(hangs=place))
    (deployment,) = started.table.deployments(dialect)
    body = json.dumps(body_of(dialect, dialect, stream=stream)).encode()

    async def leave() -> None:
        async with started.process.call(deployment, PATHS[dialect], body, []) as call:
            if place == "amid the text":
                await call.start()
                await anext(call.chunks())
            else:
                await asyncio.to_thread(started.cloud.until, started.cloud.generations)

    started.run(leave())
    request = started.cloud.generations()[0]
    started.cloud.until(lambda: request.left_at)
    assert request.left_at is not None


def test_a_deployment_over_its_budget_is_not_chosen(started: Started) -> None:
    (deployment,) = started.table.deployments("pricey")
    assert started.choose("pricey") == deployment
    assert started.run(started.ask(deployment, "chat", stream=False))[0] == 200
    deadline = time.monotonic() + 10
    with pytest.raises(RequestError, match="over budget:") as caught:
        while time.monotonic() < deadline:  # it is told after the answer
            started.choose("pricey")
            time.sleep(0.05)
    assert caught.value.code == "over_budget"


def test_a_config_that_litellm_refuses_is_told_and_its_secrets_are_not(
    started: Started, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"model_name": "a", "litellm_params": {"model": "openai/x", "api_key": WRONG_KEY}}
    strategy = f"no-strategy-{WRONG_KEY}"
    config = {"model_list": [row], "router_settings": {"routing_strategy": strategy}}

    async def refused() -> LiteLLMProcess:
        process = LiteLLMProcess(table_in(tmp_path, config), tmp_path)
        process.start(lambda usage: None)
        with pytest.raises(LiteLLMUnavailable, match="no-strategy-"):
            await process.choose("a", request={})
        await process.close()
        return process

    process = started.run(refused())
    assert not process.is_usable and "***" in process.failure
    assert "LiteLLM could not be started" in caplog.text and WRONG_KEY not in caplog.text
    assert not (tmp_path / CONFIG_NAME).exists()


# ---------------------------------------------------------------- its end

CALLBACK: Final = """
import asyncio, os, time
from litellm.integrations.custom_logger import CustomLogger
class Slow(CustomLogger):
    async def async_filter_deployments(self, model, healthy_deployments, *rest, **more):
        if os.environ.get("ENDS"):
            raise SystemExit(3)
        await asyncio.sleep(60)
slow = Slow()
if os.environ.get("HANGS"):
    time.sleep(60)
"""


@contextlib.asynccontextmanager
async def slow(
    started: Started, directory: Path, **environ: str
) -> AsyncIterator[tuple[LiteLLMProcess, Deployment]]:
    """LiteLLM with a callback that chooses no deployment, or ends it, or hangs at its import."""
    (directory / "slow_callback.py").write_text(CALLBACK)
    config = config_of(started.cloud) | {"litellm_settings": {"callbacks": ["slow_callback.slow"]}}
    table = table_in(directory, config)
    table.environ |= environ
    process = LiteLLMProcess(table, directory)
    process.start(lambda usage: None)
    try:
        yield process, table.deployments("chat")[0]
    finally:
        await process.close()


def test_a_process_that_dies_ends_its_calls_and_says_so_from_then_on(
    started: Started, tmp_path: Path
) -> None:
    started.cloud.say(CloudAnswer(hangs="amid the text"))

    async def die() -> None:
        async with slow(started, tmp_path, ENDS="1") as (process, _):
            with pytest.raises(LiteLLMUnavailable, match="has ended"):
                await process.choose("chat", request={})
            while not process.failure:
                await asyncio.sleep(0.01)
            assert process.failure == "LiteLLM has ended: SystemExit: 3. Local models are served."
            with pytest.raises(LiteLLMUnavailable, match="SystemExit: 3"):
                await process.choose("chat", request={})

    started.run(die())


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_call_is_ended_by_a_stop_or_by_the_processs_death_behind_what_has_come(
    started: Started, tmp_path: Path, how: str
) -> None:
    started.cloud.say(CloudAnswer("One two.", hangs="amid the text"))
    body = json.dumps(body_of("chat", "chat", stream=True)).encode()

    async def end() -> None:
        process = LiteLLMProcess(started.table, tmp_path)
        process.start(lambda usage: None)
        (chat,) = started.table.deployments("chat")
        async with process.call(chat, PATHS["chat"], body, []) as call:
            await call.start()
            parts = call.chunks()
            assert b"data:" in await anext(parts)
            if how == "stop":
                process.end_calls(STOPS)
            else:
                assert process._process is not None
                process._process.send_signal(signal.SIGKILL)
            async for _ in parts:
                pass
            assert call.failure is not None and not call.is_complete
            assert (call.failure.text == STOPS) == (how == "stop"), call.failure
        with pytest.raises(LiteLLMUnavailable, match=STOPS if how == "stop" else "LiteLLM"):
            async with process.call(chat, PATHS["chat"], body, []):
                pass
        if how == "stop":  # its callbacks are told all the same
            with pytest.raises(RequestError, match="failed at this"):
                await process.ask("log", {})
        await process.close()

    started.run(end())


def test_a_stop_waits_for_no_import(started: Started, tmp_path: Path) -> None:
    async def stop() -> None:
        async with slow(started, tmp_path, HANGS="1") as (process, _):
            waiting = asyncio.create_task(process.choose("chat", request={}))
            await asyncio.sleep(0.1)
            process.end_calls(STOPS)
            with pytest.raises(LiteLLMUnavailable, match=STOPS):
                await waiting

    started.run(asyncio.wait_for(stop(), 50))


def test_a_choice_that_does_not_come_is_waited_for_only_so_long(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def choose() -> None:
        async with slow(started, tmp_path) as (process, _):
            (await process.line()).close()
            line = await process.line()
            asked = {"group": "chat", "excluded": [], "preferred": "", "request": {}}
            with pytest.raises(LiteLLMUnavailable, match=r"has not answered within 0\.1 s"):
                await line.ask("choose", asked, 0.1)
            line.close()

    started.run(choose())
    monkeypatch.setattr(litellm_process, "READY_S_MAX", 0.01)

    async def load() -> None:
        async with slow(started, tmp_path, HANGS="1") as (process, _):
            with pytest.raises(LiteLLMUnavailable, match="still loading"):
                await process.choose("chat", request={})

    started.run(load())
