"""The gateway tries what the config names, in order.

Whom it tries for which cause is tested at the real server (e2e/gateway/test_fallbacks.py).
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import orjson
import pytest

from hearth.proxy.api.body.prompt_limits import MESSAGES_MAX
from hearth.proxy.api.responses.response_store import ResponseStore
from hearth.proxy.gateway import gateway
from hearth.proxy.gateway.cloud_bodies import CloudDialect, cloud_body
from hearth.proxy.gateway.gateway import Gateway, GatewayCall
from hearth.proxy.gateway.litellm_process import LiteLLMProcess, LiteLLMUnavailable
from hearth.proxy.gateway.local_accounts import Accounts
from hearth.proxy.gateway.routing_table import Deployment, RoutingTable, read_table
from hearth.proxy.http.http_exchange import BodyBudget, HttpExchange
from hearth.proxy.request.model_names import ModelNames
from hearth.shared.errors import Overloaded, PromptTooLong, RequestError, WorkerLost
from hearth.shared.settings import load_settings

CONFIG = {
    "model_list": [
        {"model_name": "pair", "litellm_params": {"model": "hearth/a"}},
        {"model_name": "pair", "litellm_params": {"model": "hearth/b"}},
        {"model_name": "far", "litellm_params": {"model": "openai/x"}},
    ],
    "litellm_settings": {
        "fallbacks": [{"far": ["c"]}, {"pair": ["c", "d"]}, {"c": ["pair", "d"]}, {"d": ["c"]}],
        "context_window_fallbacks": [{"pair": ["d"]}],
    },
}
MODELS = {"MODEL_PATH": "m/a", "PROXY_MODEL_ID": "a", "MODELS": "b=m/b,c=m/c,d=m/d"}


class LiteLLM:
    """Chooses the first deployment that is left, and answers each call with `chunks`."""

    is_usable = True
    is_complete = True
    failure = None

    def __init__(self, table: RoutingTable) -> None:
        self.table = table
        self.unavailable = ""
        self.asked: list[tuple[str, str]] = []  # group, preferred
        self.sent = b""
        self.replies: list[bytes] = []
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1

    async def choose(
        self, group: str, *, excluded: set[str], preferred: str, request: Any, size: int
    ) -> Deployment:
        self.asked.append((group, preferred))
        if self.unavailable:
            raise LiteLLMUnavailable(self.unavailable)
        left = [row for row in self.table.deployments(group) if row.id not in excluded]
        if not left:
            raise RequestError("None is left.", status=503, code="no_deployment")
        return next((row for row in left if row.id == preferred), left[0])

    @contextlib.asynccontextmanager
    async def call(self, deployment: Deployment, path: str, body: bytes, headers: Any) -> Any:
        self.sent = body
        yield self

    async def start(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        return 200, []

    async def chunks(self) -> AsyncIterator[bytes]:
        for chunk in self.replies:
            yield chunk


class World:
    """A gateway of models a to d before LiteLLM, and what it does with one request at a time."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        path = directory / "config.yaml"
        path.write_bytes(orjson.dumps(config))
        settings = load_settings(MODELS, None)
        table = read_table(path, settings, {}, {})
        self.litellm = LiteLLM(table)
        self.store = ResponseStore()
        self.causes: list[str] = []
        self.metrics = SimpleNamespace(gateway=SimpleNamespace(fell_back=self.causes.append))
        self.sent: list[tuple[Any, int]] = []  # each message, and how many responses were kept then
        self.asked: list[str] = []
        self.counted: list[str] = []  # at the end of a request
        self.gateway = Gateway(
            table,
            ModelNames.of(settings),
            cast(LiteLLMProcess, self.litellm),
            self.store,
            cast(Any, self),
            Accounts({}, cast(Any, None), checks_keys=False),
        )

    def cloud_ended(self, exchange: HttpExchange, reply: Any) -> None:
        """What became of it is seen by whom it is told."""

    def ask(
        self, group: str, errors: dict[str, RequestError], size: int = 100, **body: Any
    ) -> list[str]:
        """Return the local models that were asked for `group`; those in `errors` refuse."""
        for rows in (self.sent, self.asked, self.counted, self.causes):
            rows.clear()
        empty = {} if "input" in body else {"messages": []}
        asyncio.run(self._serve(group, errors, size, empty | body))
        return list(self.asked)

    async def _serve(self, group: str, errors: Any, size: int, body: dict[str, Any]) -> None:
        async def send(message: Any) -> None:
            self.sent.append((message, len(self.store)))

        async def answer(deployment: Deployment) -> None:
            self.asked.append(deployment.local)
            exchange.counting.callback(self.counted.append, deployment.local)
            if deployment.local in errors:
                raise errors[deployment.local]
            await exchange.send_json(200, {"from": deployment.local})

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
        exchange = HttpExchange(scope, cast(Any, asyncio.Event().wait), send, BodyBudget())
        dialect: CloudDialect = "responses" if "input" in body else "chat"
        try:
            await self.gateway.serve(exchange, group, GatewayCall(dialect, body, size, answer))
        finally:
            exchange.end()

    @property
    def fallback(self) -> str:
        return dict(self.sent[0][0]["headers"]).get(b"x-hearth-fallback", b"").decode()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, CONFIG)


FULL = Overloaded("It is full.")
LONG = PromptTooLong(tokens=10, tokens_max=5)


def test_names_that_are_only_alike_go_behind_all_exact_ones_and_before_patterns(
    tmp_path: Path,
) -> None:
    star = {"model_name": "*", "litellm_params": {"model": "openai/*"}}
    alike = {"model_name": "A", "litellm_params": {"model": "hearth/b"}}
    config = {**CONFIG, "model_list": [*CONFIG["model_list"], alike, star]}
    gateway = World(tmp_path, config).gateway
    for name, group in (
        ("A", "A"),
        ("a", "a"),
        ("a:latest", "A"),  # of two that are alike the config's
        ("PAIR", "pair"),
        ("Far:latest", "far"),
        ("C:latest", "c"),
        ("openai/C", "c"),  # as openai/c would be: the prompt stays here
        ("another", "another"),
        ("gpt-5", "gpt-5"),
    ):
        assert gateway.group_of(name) == group, name
    bare = World(tmp_path, CONFIG).gateway
    assert (bare.group_of("GPT-5"), bare.group_of("another")) == ("a", None)


LATE: Final = ["prompt_too_long"]
# Asked for, who refuses and why; who is asked in turn, and the causes that are counted; behind the
# last who refuses nothing follows, and the first failure is told.
REFUSALS: Final[tuple[tuple[str, dict[str, RequestError], str, list[str]], ...]] = (
    ("pair", {"a": FULL}, "ab", ["overloaded"]),
    ("pair", {"a": FULL, "b": WorkerLost("It is gone.")}, "abc", ["overloaded", "worker_lost"]),
    ("pair", {"a": LONG, "b": LONG}, "abd", LATE * 2),
    ("c", {"c": LONG}, "ca", LATE),  # there is no list of its own for long ones
    ("d", {"d": LONG, "c": FULL, "a": FULL, "b": FULL}, "dcab", [*LATE, *["overloaded"] * 2]),
    ("pair", dict.fromkeys("abcd", FULL), "abcd", ["overloaded"] * 3),
    ("b", {"b": FULL}, "b", []),
    ("pair", {"a": RequestError("It is wrong.")}, "a", []),
)


@pytest.mark.parametrize(("group", "errors", "asked", "causes"), REFUSALS)
def test_each_is_asked_once_in_the_order_of_the_config(
    world: World, group: str, errors: dict[str, RequestError], asked: str, causes: list[str]
) -> None:
    if asked[-1] in errors:
        with pytest.raises(RequestError) as caught:
            world.ask(group, errors)
        assert caught.value is errors[asked[0]]
    else:
        world.ask(group, errors)
        assert world.fallback.count(";") == len(asked) - 2
    assert ("".join(world.asked), world.causes) == (asked, causes)
    assert world.counted == [asked[-1]], "only an attempt that nobody makes up for is counted"


def test_no_more_fallbacks_are_begun_than_the_config_lets(world: World) -> None:
    world.gateway.table.fallback_lists.steps_max = 1
    with pytest.raises(Overloaded):
        world.ask("d", dict.fromkeys("abcd", FULL))
    assert (world.asked, world.causes) == (["d", "c"], ["overloaded"])


def test_without_litellms_choice_the_local_deployments_of_a_group_answer(world: World) -> None:
    world.litellm.unavailable = "A callback holds it up."
    assert world.ask("pair", {"a": FULL}) == ["a", "b"]
    assert (world.ask("far", {}), world.fallback) == (["c"], "far other")
    asked = len(world.litellm.asked)
    world.litellm.is_usable, world.litellm.wakes = False, 0
    assert world.ask("pair", {"a": FULL}) == ["a", "b"]
    assert len(world.litellm.asked) == asked and world.litellm.wakes == 2


def test_a_conversation_by_response_ids_comes_back_to_where_it_began(world: World) -> None:
    """Its later requests have the new turn alone, and no name of a session."""
    store, first = world.store, {"input": "The first question"}
    assert world.ask("pair", {"a": FULL}, **first) == ["a", "b"]
    store.keep("", first, response_of("resp_1"))
    again = {"input": "Go on", "previous_response_id": "resp_1"}
    assert world.ask("pair", {}, **again) == ["b"]
    assert world.ask("pair", {"b": FULL}, **again) == ["b", "a"]
    store.keep("", store.expand("", again), response_of("resp_2"), maker="another")
    assert world.ask("pair", {}, input="More", previous_response_id="resp_2") == ["b"]
    assert world.ask("pair", {}, input="Go on") == ["a"], "another conversation"


def response_of(response_id: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": "Yes", "annotations": []}
    said = {"type": "message", "id": f"msg_{response_id}", "role": "assistant", "content": [part]}
    about = {"object": "response", "status": "completed", "model": "x", "created_at": 1}
    return {"id": response_id, **about, "output": [said]}


# ---------------------------------------------------------------- large bodies

RESPONSE = {"id": "resp_1", "status": "completed", "object": "response", "output": []}
ENDED = b"data: %b\n\n" % orjson.dumps({"type": "response.completed", "response": RESPONSE})


@pytest.mark.parametrize(("size", "is_apart"), [(100, False), (10_000_000, True)])
def test_a_large_body_is_filtered_beside_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch, size: int, is_apart: bool
) -> None:
    """400,000 parts take over half a second, in which nobody else would be served."""
    parts = [{"type": "text", "text": "a"} for _ in range(1_000)]
    rows, threads = [{"role": "user", "content": parts}], set()

    def noted(*given: Any) -> dict[str, Any]:
        threads.add(threading.get_ident())
        return cloud_body(*given)

    monkeypatch.setattr(gateway, "cloud_body", noted)
    world.litellm.replies = [b"{}"]
    world.ask("far", {}, size, model="far", messages=rows)
    assert orjson.loads(world.litellm.sent)["messages"] == rows
    assert (threading.get_ident() not in threads) == is_apart and len(threads) == 1


@pytest.mark.parametrize("name", ["messages", "input"])
def test_there_are_as_many_messages_as_for_a_local_model(world: World, name: str) -> None:
    rows = [{"role": "user", "content": "a"}] * (MESSAGES_MAX + 1)
    with pytest.raises(RequestError, match="20,001 and this server accepts 20,000"):
        world.ask("far", {}, 1_000_000, **{name: rows})
    assert world.litellm.sent == b""


@pytest.mark.parametrize("size", [100, 10_000_000])
def test_a_response_is_kept_before_its_client_can_read_its_end(world: World, size: int) -> None:
    """Who has read the end may go on from it at once."""
    world.litellm.replies = [b"data: {}\n\n", ENDED, b"data: [DONE]\n\n"]
    world.ask("far", {}, size, input="Hi", stream=True)
    assert [count for message, count in world.sent if "body" in message] == [0, 1, 1, 1]
    world.store.delete("", "resp_1")
    world.litellm.replies = [orjson.dumps(RESPONSE)]
    world.ask("far", {}, size, input="Hi", stream=False)
    assert [count for message, count in world.sent if message.get("body") == b""] == [1]
