"""Drives the pinned LiteLLM in its own thread: choices, pinned calls, failures, cancels."""

import asyncio
import contextlib
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from hearth.proxy.event_loop import SuspendingEventLoop
from hearth.proxy.gateway.cloud.cloud_failure import CloudFailure
from hearth.proxy.gateway.config.routing_table import Deployment, RoutingTable, read_table
from hearth.proxy.gateway.litellm_thread import (
    CONFIG_NAME,
    LiteLLMThread,
    LiteLLMUnavailable,
    NoDeployment,
    printing_nothing,
)
from hearth.shared.settings_from_env import load_settings
from tests.helpers.cloud import cloud_answers as says
from tests.helpers.cloud.cloud_answers import CloudAnswer, CloudError
from tests.helpers.servers.mock_cloud import MockCloud

pytestmark = [
    pytest.mark.process,
    # LiteLLM's late imports warn of its own types, and its clients are never closed.
    pytest.mark.filterwarnings("ignore"),
]
WRONG_KEY = "sk-wrong-0123456789abcdef"
PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
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
    """LiteLLM in its thread, the loop that asks it, and the cloud behind it."""

    cloud: MockCloud
    table: RoutingTable
    thread: LiteLLMThread
    runner: asyncio.Runner
    printed: str = ""
    config_mode: int = 0

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def choose(self, group: str, **more: Any) -> Deployment:
        return self.run(self.thread.choose(group, **more))

    async def ask(
        self, deployment: Deployment, dialect: str, *, stream: bool
    ) -> tuple[int, bytes, CloudFailure | None]:
        body = json.dumps(body_of(dialect, deployment.group, stream=stream)).encode()
        async with await self.thread.call(deployment, PATHS[dialect], body, []) as call:
            status, _ = await call.start()
            data = b"" if call.failure else b"".join([part async for part in call.chunks()])
            return status, data, call.failure


def body_of(dialect: str, group: str, *, stream: bool) -> dict[str, Any]:
    if dialect == "responses":
        return {"model": group, "input": "hi", "stream": stream}
    talk = {"model": group, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    return talk | ({"max_tokens": 100} if dialect == "messages" else {})


class Watch:
    """Notes the mode of a file as soon as it is there. Owner: its thread, until `mode` is set."""

    def __init__(self, path: Path) -> None:
        self.mode = 0
        self._path = path
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        deadline = time.monotonic() + 60
        while not self.mode and time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                self.mode = stat.S_IMODE(self._path.stat().st_mode)
            time.sleep(0.0005)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    directory = tmp_path_factory.mktemp("litellm")
    environ, path = dict(os.environ), list(sys.path)
    with MockCloud() as cloud, asyncio.Runner(loop_factory=SuspendingEventLoop) as runner:
        table = table_in(directory, config_of(cloud))
        thread = LiteLLMThread(table, directory, SuspendingEventLoop)
        found = Started(cloud, table, thread, runner)
        watch = Watch(directory / CONFIG_NAME)
        with contextlib.redirect_stdout(Heard()) as heard:
            runner.run(begin(thread))
        found.printed, found.config_mode = "".join(heard.texts), watch.mode
        yield found
        runner.run(thread.close())
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = path


class Heard:
    """A stdout that keeps what is written."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, text: str) -> int:
        self.texts.append(text)
        return len(text)

    def flush(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _forgotten(started: Started) -> None:
    started.cloud.forget()


def table_in(directory: Path, config: dict[str, Any]) -> RoutingTable:
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    settings = load_settings({"RUN_DIR": str(directory)}, None)
    return read_table(path, settings, dict(os.environ), {})


async def begin(thread: LiteLLMThread) -> None:
    thread.start()
    await thread.ready()


def test_it_prints_nothing_and_leaves_no_config_behind(started: Started) -> None:
    assert started.thread.is_usable and started.thread.started_s > 0
    assert started.printed == ""
    assert started.config_mode == 0o600
    assert not (started.table.config.path.parent / CONFIG_NAME).exists()


def test_what_other_threads_print_meanwhile_is_printed() -> None:
    with contextlib.redirect_stdout(Heard()) as heard, printing_nothing(threading.get_ident()):
        print("swallowed")
        other = threading.Thread(target=print, args=("heard",))
        other.start()
        other.join()
    assert "".join(heard.texts) == "heard\n"


def test_it_runs_on_a_loop_of_its_own_and_leaves_ours_alone(started: Started) -> None:
    async def both() -> tuple[asyncio.AbstractEventLoop, str, int, int]:
        async def there() -> tuple[asyncio.AbstractEventLoop, str, int]:
            name = threading.current_thread().name
            return asyncio.get_running_loop(), name, len(asyncio.all_tasks())

        loop, name, count = await started.thread.run(there)
        assert loop is not asyncio.get_running_loop()
        return loop, name, count, len(asyncio.all_tasks())

    loop, name, theirs, ours = started.run(both())
    assert isinstance(loop, SuspendingEventLoop) and name == "litellm"
    assert theirs > 2  # its own jobs
    assert ours == 1


def test_the_router_chooses_among_what_is_not_excluded(started: Started) -> None:
    first, second = started.table.deployments("two")
    assert {started.choose("two").id for _ in range(40)} == {first.id, second.id}
    assert started.choose("two", excluded={first.id}) == second
    assert {started.choose("two", preferred=first.id).id for _ in range(20)} == {first.id}
    assert started.choose("two", preferred=first.id, excluded={first.id}) == second
    with pytest.raises(NoDeployment, match="No deployments available"):
        started.choose("two", excluded={first.id, second.id})


def test_a_local_deployment_may_be_chosen(started: Started) -> None:
    cloud, local = started.table.deployments("mixed")
    assert started.choose("mixed", excluded={cloud.id}) == local and local.local == "smollm2"
    assert started.choose("smollm2").local == "smollm2"


def test_a_name_that_is_no_group_has_no_deployment(started: Started) -> None:
    with pytest.raises(NoDeployment):
        started.choose("gone")


def test_a_call_goes_to_the_deployment_it_is_pinned_to(started: Started) -> None:
    for deployment in started.table.deployments("two") * 4:
        status, _, failure = started.run(started.ask(deployment, "chat", stream=False))
        assert status == 200 and failure is None
    models = [request.model for request in started.cloud.generations()]
    assert models == ["first", "second"] * 4


def test_two_calls_at_once_keep_their_own_deployments(started: Started) -> None:
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
    deployment = started.choose(group)
    assert started.run(started.ask(deployment, "chat", stream=True))[0] == 200
    assert [request.model for request in started.cloud.generations()] == ["my-model"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", list(PATHS))
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
    for dialect in PATHS:
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


LEAVES = [(dialect, True, place) for dialect in PATHS for place in ("amid the text",)] + [
    (dialect, stream, "before the head") for dialect in PATHS for stream in (True, False)
]


@pytest.mark.parametrize(("dialect", "stream", "place"), LEAVES)
def test_a_client_that_leaves_ends_the_clouds_request_within_a_second(
    started: Started, dialect: str, stream: bool, place: Any
) -> None:
    started.cloud.say(CloudAnswer(hangs=place))
    (deployment,) = started.table.deployments(dialect)
    body = json.dumps(body_of(dialect, dialect, stream=stream)).encode()

    async def leave() -> None:
        async with await started.thread.call(deployment, PATHS[dialect], body, []) as call:
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
    with pytest.raises(NoDeployment, match="over budget:"):
        while time.monotonic() < deadline:  # it is told after the answer
            started.choose("pricey")
            time.sleep(0.05)


def test_a_config_that_litellm_refuses_is_told_and_its_secrets_are_not(
    started: Started, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"model_name": "a", "litellm_params": {"model": "openai/x", "api_key": WRONG_KEY}}
    strategy = f"no-strategy-{WRONG_KEY}"
    config = {"model_list": [row], "router_settings": {"routing_strategy": strategy}}

    async def refused() -> LiteLLMThread:
        thread = LiteLLMThread(table_in(tmp_path, config), tmp_path, SuspendingEventLoop)
        thread.start()
        with pytest.raises(LiteLLMUnavailable, match="no-strategy-"):
            await thread.choose("a")
        await thread.close()
        return thread

    thread = started.run(refused())
    assert not thread.is_usable and "***" in thread.failure
    assert "LiteLLM could not be started" in caplog.text and WRONG_KEY not in caplog.text
    assert not (tmp_path / CONFIG_NAME).exists()
