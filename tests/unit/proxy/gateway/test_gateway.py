"""The gateway tries what the config names, in order, and nothing after the first byte."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

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
    cause_of,
    cause_word,
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
    sent: list[dict[str, Any]]

    def ask(
        self,
        group: str,
        errors: dict[str, RequestError],
        counted: list[str] | None = None,
        **body: Any,
    ) -> list[str]:
        """Return the models that were asked for `group`, of which those in `errors` refuse.

        `counted` gets those that were counted at the end of a request.
        """
        asked = []
        self.sent.clear()

        async def serve() -> None:
            exchange = self._exchange()

            async def answer(deployment: Deployment) -> None:
                asked.append(deployment.local)
                if counted is not None:
                    exchange.count_later = partial(counted.append, deployment.local)
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
    return World(gateway, router, records, [])


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
    assert world.records.causes == ["overloaded", "overloaded", "worker_lost"]


def test_a_failure_that_nothing_follows_is_no_fallback(world: World) -> None:
    with pytest.raises(Overloaded):
        world.ask("b", {"b": FULL})
    assert world.records.causes == []


def test_a_group_of_which_none_can_be_had_is_a_fallback_too(world: World) -> None:
    world.router.unavailable = "It does not start."
    world.router.is_usable = True
    assert world.ask("far", {}) == ["c"]
    assert world.records.causes == ["other"]


def test_no_more_fallbacks_are_begun_than_the_config_lets(world: World) -> None:
    errors: dict[str, RequestError] = {name: FULL for name in "abcd"}
    with pytest.raises(Overloaded):
        world.ask("pair", errors)
    assert world.records.causes == ["overloaded"] * 3  # a, b, c; then d, which is the last
    world.gateway.table.fallbacks_max = 1
    asked = []
    with pytest.raises(Overloaded):
        asked += world.ask("d", errors)
    assert world.records.causes[3:] == ["overloaded"]  # d; then c, behind which is nothing


def test_an_attempt_that_another_makes_up_for_is_not_counted_as_a_request(world: World) -> None:
    counted: list[str] = []
    world.ask("pair", {"a": LOST}, counted=counted)
    assert counted == ["b"]
    counted.clear()
    with pytest.raises(WorkerLost):
        world.ask("b", {"b": LOST}, counted=counted)
    assert counted == ["b"]


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
    assert world.ask("far", {}) == ["c"]
    assert world.fallback == "far other"


def test_where_litellm_does_not_choose_a_local_deployment_of_the_group_answers(
    world: World,
) -> None:
    world.router.unavailable = "A callback holds it up."
    assert world.ask("pair", {"a": FULL}) == ["a", "b"]
    assert len(world.router.asked) == 1


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
