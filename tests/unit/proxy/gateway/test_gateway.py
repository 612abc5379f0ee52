"""The gateway tries what the config names, in order; whom it tries for which cause is tested at the
real server (e2e/gateway/test_fallbacks.py)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import orjson
import pytest

from hearth.proxy.api.responses.response_store import ResponseStore
from hearth.proxy.gateway.accounts.accounts import Accounts
from hearth.proxy.gateway.cloud.cloud_bodies import CloudDialect
from hearth.proxy.gateway.config.routing_table import Deployment, read_table
from hearth.proxy.gateway.gateway import (
    CloudReply,
    Gateway,
    GatewayCall,
)
from hearth.proxy.gateway.litellm_process import LiteLLMProcess, LiteLLMUnavailable
from hearth.proxy.http.body_memory_budget import BodyBudget
from hearth.proxy.http.http_exchange import HttpExchange
from hearth.proxy.request.model_names import ModelNames
from hearth.shared.errors import Overloaded, PromptTooLong, RequestError, WorkerLost
from hearth.shared.settings_from_env import load_settings

Answer = Callable[[HttpExchange, Deployment], Awaitable[None]]


class Router:
    """Chooses the first deployment that is left, as long as LiteLLM is there."""

    is_usable = True

    def __init__(self, gateway: "Gateway | None" = None) -> None:
        self.unavailable = ""
        self.table: Any = None
        self.asked: list[tuple[str, str]] = []

    async def choose(
        self, group: str, *, excluded: set[str], preferred: str, request: Any, size: int
    ) -> Deployment:
        self.asked.append((group, preferred))
        if self.unavailable:
            raise LiteLLMUnavailable(self.unavailable)
        left = [row for row in self.table.deployments(group) if row.id not in excluded]
        chosen = next((row for row in left if row.id == preferred), left[0] if left else None)
        if chosen is None:
            raise RequestError("None is left.", status=503, code="no_deployment")
        return cast(Deployment, chosen)


@dataclass
class Records:
    causes: list[str] = field(default_factory=list)

    def fell_back(self, cause: str) -> None:
        self.causes.append(cause)

    def cloud_ended(self, exchange: HttpExchange, call: GatewayCall, reply: CloudReply) -> None:
        raise AssertionError("every deployment here is local")


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


@dataclass
class World:
    gateway: Gateway
    router: Router
    records: Records
    sent: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)  # at the end of a request

    def ask(
        self,
        group: str,
        errors: dict[str, RequestError],
        **body: Any,
    ) -> list[str]:
        """Return the models that were asked for `group`, of which those in `errors` refuse."""
        for rows in (self.sent, self.asked, self.counted):
            rows.clear()

        async def serve() -> None:
            exchange = self._exchange()

            async def answer(deployment: Deployment) -> None:
                self.asked.append(deployment.local)
                exchange.count_later = partial(self.counted.append, deployment.local)
                if deployment.local in errors:
                    raise errors[deployment.local]
                await exchange.send_json(200, {"from": deployment.local})

            dialect: CloudDialect = "responses" if "input" in body else "chat"
            asked_of = body if "input" in body else {"messages": [], **body}
            call = GatewayCall(dialect, asked_of, 100, answer)
            try:
                await self.gateway.serve(exchange, group, call)
            finally:
                exchange.end()

        asyncio.run(serve())
        return list(self.asked)

    def _exchange(self) -> HttpExchange:
        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            self.sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
        return HttpExchange(scope, receive, send, BodyBudget())

    @property
    def fallback(self) -> str:
        return dict(self.sent[0]["headers"]).get(b"x-hearth-fallback", b"").decode()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return world_of(CONFIG, tmp_path)


def world_of(config: dict[str, Any], tmp_path: Path) -> World:
    path = tmp_path / "config.yaml"
    path.write_bytes(orjson.dumps(config))
    settings = load_settings(MODELS, None)
    table = read_table(path, settings, {}, {})
    router, records = Router(), Records()
    router.table = table
    accounts = Accounts({}, cast(Any, None), checks_keys=False)
    gateway = Gateway(
        table,
        ModelNames.of(settings),
        cast(LiteLLMProcess, router),
        ResponseStore(),
        records,
        accounts,
    )
    return World(gateway, router, records)


FULL = Overloaded("It is full.")
LONG = PromptTooLong(tokens=10, tokens_max=5)
LOST = WorkerLost("It is gone.")
MISTAKE = RequestError("It is wrong.")


def test_names_that_are_only_alike_go_behind_all_exact_ones_and_before_patterns(
    tmp_path: Path,
) -> None:
    star = {"model_name": "*", "litellm_params": {"model": "openai/*"}}
    alike = {"model_name": "A", "litellm_params": {"model": "hearth/b"}}
    config = {**CONFIG, "model_list": [*CONFIG["model_list"], alike, star]}
    gateway = world_of(config, tmp_path).gateway
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
    bare = world_of(CONFIG, tmp_path).gateway
    assert (bare.group_of("GPT-5"), bare.group_of("another")) == ("a", None)


LATE: Final = ["prompt_too_long"]
# Asked for, who refuses and why; who is asked in turn, and the causes that are counted; behind the
# last who refuses nothing follows, and the first failure is told.
REFUSALS: Final[tuple[tuple[str, dict[str, RequestError], str, list[str]], ...]] = (
    ("pair", {"a": FULL}, "ab", ["overloaded"]),
    ("pair", {"a": FULL, "b": LOST}, "abc", ["overloaded", "worker_lost"]),
    ("pair", {"a": LONG, "b": LONG}, "abd", LATE * 2),
    ("c", {"c": LONG}, "ca", LATE),  # there is no list of its own for long ones
    ("d", {"d": LONG, "c": FULL, "a": FULL, "b": FULL}, "dcab", [*LATE, *["overloaded"] * 2]),
    ("pair", dict.fromkeys("abcd", FULL), "abcd", ["overloaded"] * 3),
    ("b", {"b": FULL}, "b", []),
    ("pair", {"a": MISTAKE}, "a", []),
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
    assert ("".join(world.asked), world.records.causes) == (asked, causes)
    assert world.counted == [asked[-1]], "only an attempt that nobody makes up for is counted"


def test_no_more_fallbacks_are_begun_than_the_config_lets(world: World) -> None:
    world.gateway.table.fallbacks_max = 1
    with pytest.raises(Overloaded):
        world.ask("d", dict.fromkeys("abcd", FULL))
    assert (world.asked, world.records.causes) == (["d", "c"], ["overloaded"])


@pytest.mark.parametrize("is_usable", [True, False])
def test_without_litellms_choice_the_local_deployments_of_a_group_answer(
    world: World, is_usable: bool
) -> None:
    world.router.is_usable, world.router.unavailable = is_usable, "A callback holds it up."
    assert world.ask("pair", {"a": FULL}) == ["a", "b"]
    assert len(world.router.asked) == is_usable
    if is_usable:
        assert world.ask("far", {}) == ["c"]
        assert world.fallback == "far other"


def test_a_conversation_by_response_ids_comes_back_to_where_it_began(world: World) -> None:
    """Its later requests have the new turn alone, and no name of a session."""
    store, first = world.gateway._stored, {"input": "The first question"}
    assert world.ask("pair", {"a": FULL}, **first) == ["a", "b"]
    store.keep("", first, response_of("resp_1"))
    again = {"input": "Go on", "previous_response_id": "resp_1"}
    assert world.ask("pair", {}, **again) == ["b"]
    assert world.ask("pair", {"b": FULL}, **again) == ["b", "a"]
    store.keep("", store.expanded("", again), response_of("resp_2"), maker="another")
    assert world.ask("pair", {}, input="More", previous_response_id="resp_2") == ["b"]
    assert world.ask("pair", {}, input="Go on") == ["a"], "another conversation"


def response_of(response_id: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": "Yes", "annotations": []}
    said = {"type": "message", "id": f"msg_{response_id}", "role": "assistant", "content": [part]}
    about = {"object": "response", "status": "completed", "model": "x", "created_at": 1}
    return {"id": response_id, **about, "output": [said]}
