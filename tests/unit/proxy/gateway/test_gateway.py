"""The gateway tries what the config names, in order, and nothing after the first byte."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from hearth.proxy.api.responses.response_store import ResponseStore
from hearth.proxy.gateway.accounts.accounts import Accounts
from hearth.proxy.gateway.config.routing_table import Deployment, read_table
from hearth.proxy.gateway.gateway import (
    CloudReply,
    Gateway,
    GatewayCall,
    cause_of,
    cause_word,
)
from hearth.proxy.gateway.litellm_thread import LiteLLMThread, LiteLLMUnavailable, NoDeployment
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
        self, group: str, *, excluded: set[str], preferred: str, request_kwargs: Any
    ) -> Deployment:
        self.asked.append((group, preferred))
        if self.unavailable:
            raise LiteLLMUnavailable(self.unavailable)
        left = [row for row in self.table.deployments(group) if row.id not in excluded]
        chosen = next((row for row in left if row.id == preferred), left[0] if left else None)
        if chosen is None:
            raise NoDeployment("None is left.")
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
    ],
    "litellm_settings": {
        "fallbacks": [{"pair": ["c", "d"]}, {"c": ["pair", "d"]}, {"d": ["c"]}],
        "context_window_fallbacks": [{"pair": ["d"]}],
    },
}
MODELS = {"MODEL_PATH": "m/a", "PROXY_MODEL_ID": "a", "MODELS": "b=m/b,c=m/c,d=m/d"}


@dataclass
class World:
    gateway: Gateway
    router: Router
    records: Records
    sent: list[dict[str, Any]]

    def ask(self, group: str, errors: dict[str, RequestError], **body: Any) -> list[str]:
        """Return the models that were asked for `group`, of which those in `errors` refuse."""
        asked = []
        self.sent.clear()

        async def serve() -> None:
            exchange = self._exchange()

            async def answer(deployment: Deployment) -> None:
                asked.append(deployment.local)
                if deployment.local in errors:
                    raise errors[deployment.local]
                await exchange.send_json(200, {"from": deployment.local})

            call = GatewayCall("chat", {"messages": [], **body}, 100, answer)
            await self.gateway.serve(exchange, group, call)
            exchange.end()

        asyncio.run(serve())
        return asked

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
    path = tmp_path / "config.yaml"
    path.write_bytes(orjson.dumps(CONFIG))
    settings = load_settings(MODELS, None)
    table = read_table(path, settings, {}, {})
    router, records = Router(), Records()
    router.table = table
    accounts = Accounts.of({}, cast(Any, None), cast(Any, None), checks_keys=False)
    gateway = Gateway(
        table,
        ModelNames.of(settings),
        cast(LiteLLMThread, router),
        ResponseStore(),
        records,
        accounts,
    )
    return World(gateway, router, records, [])


FULL = Overloaded("It is full.")
LONG = PromptTooLong(tokens=10, tokens_max=5)
LOST = WorkerLost("It is gone.")
MISTAKE = RequestError("It is wrong.")


def test_the_group_itself_is_tried_to_its_end_before_what_follows_it(world: World) -> None:
    assert world.ask("pair", {}) == ["a"]
    assert world.fallback == ""
    assert world.ask("pair", {"a": FULL}) == ["a", "b"]
    assert world.fallback == "hearth/a overloaded"
    assert world.ask("pair", {"a": FULL, "b": LOST}) == ["a", "b", "c"]
    assert world.fallback == "hearth/a overloaded; hearth/b worker_lost"
    assert world.records.causes == ["overloaded", "overloaded", "worker_lost"]


def test_a_long_prompt_goes_where_long_ones_go_and_where_there_is_no_list_to_the_other(
    world: World,
) -> None:
    assert world.ask("pair", {"a": LONG, "b": LONG}) == ["a", "b", "d"]
    assert world.ask("c", {"c": LONG}) == ["c", "a"]


def test_a_circle_ends_and_the_first_failure_is_told(world: World) -> None:
    first = Overloaded("The first is full.")
    with pytest.raises(RequestError, match="The first is full"):
        world.ask("d", {"d": first, "c": FULL, "a": LOST, "b": LOST})
    assert world.records.causes == ["overloaded", "overloaded", "worker_lost", "worker_lost"]


def test_a_mistake_of_the_clients_is_told_at_once(world: World) -> None:
    with pytest.raises(RequestError, match="It is wrong"):
        world.ask("pair", {"a": MISTAKE})
    assert world.records.causes == []


def test_nothing_follows_an_answer_that_has_begun(world: World) -> None:
    async def serve() -> None:
        exchange = world._exchange()

        async def answer(deployment: Deployment) -> None:
            await exchange.start(200, [])
            raise LOST

        await world.gateway.serve(
            exchange, "pair", GatewayCall("chat", {"messages": []}, 100, answer)
        )

    with pytest.raises(WorkerLost):
        asyncio.run(serve())
    assert len(world.sent) == 1 and world.records.causes == []


def test_a_session_comes_back_to_where_it_began(world: World) -> None:
    talk = {"prompt_cache_key": "s1"}
    assert world.ask("pair", {}, **talk) == ["a"]
    assert world.ask("pair", {"a": FULL}, **talk) == ["a", "b"]
    assert world.ask("pair", {}, **talk) == ["a"]
    (began,) = {preferred for _, preferred in world.router.asked if preferred}
    assert world.gateway.table.deployment("pair", began).local == "a"  # type: ignore[union-attr]


def test_without_litellm_the_local_deployments_of_a_group_answer(world: World) -> None:
    world.router.is_usable = False
    assert world.ask("pair", {"a": FULL}) == ["a", "b"]
    assert world.router.asked == []


def test_where_litellm_cannot_be_had_what_follows_is_local(world: World) -> None:
    world.router.unavailable = "It does not start."
    assert world.ask("pair", {}) == ["c"]
    assert world.fallback == "pair other"


@pytest.mark.parametrize(
    ("error", "cause", "word"),
    [
        (FULL, "error", "overloaded"),
        (LONG, "context_window", "prompt_too_long"),
        (LOST, "error", "worker_lost"),
        (MISTAKE, None, "other"),
        (RequestError("x", status=503, code="model_unavailable"), "error", "model_not_loadable"),
        (RequestError("x", status=503, code="slow_reader"), None, "other"),
        (RequestError("x", status=500, code="internal_error"), None, "other"),
    ],
)
def test_a_cause_is_told_by_the_code(error: RequestError, cause: str | None, word: str) -> None:
    assert (cause_of(error), cause_word(error)) == (cause, word)
