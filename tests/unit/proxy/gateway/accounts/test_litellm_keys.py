"""Checks how long a request waits for LiteLLM to know its key, and whose it then is."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from hearth.proxy.gateway.accounts import litellm_keys
from hearth.proxy.gateway.accounts.accounts import Accounts
from hearth.proxy.gateway.accounts.litellm_keys import KeyCaller, KeyOwner, LiteLLMKeys, route_of
from hearth.proxy.gateway.accounts.litellm_usage import KeyedCall
from hearth.proxy.request.parsed_request import Dialect
from hearth.proxy.request.session_id import key_digest
from hearth.shared.errors import RequestError

CALLER = KeyCaller("POST", "/v1/messages", [(b"x-api-key", b"sk-1")])


@dataclass
class LiteLLM:
    """Stands for LiteLLM's loop, and for its checks: they know one key."""

    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[str] = field(default_factory=list)

    async def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return await work()

    async def ready(self) -> None:
        await self.is_ready.wait()

    async def owner(self, caller: KeyCaller, group: str) -> KeyOwner:
        self.asked.append(group)
        await self.answers.wait()
        if dict(caller.headers).get(b"x-api-key") != b"sk-1":
            raise RequestError("It is wrong.", status=401, code="invalid_api_key")
        return KeyOwner("sk-1")

    async def begin(
        self, caller: KeyCaller, group: str, dialect: Dialect, request_id: str
    ) -> tuple[KeyOwner, KeyedCall]:
        return await self.owner(caller, group), KeyedCall(None, {"id": request_id}, None)


def keys_of(litellm: LiteLLM) -> LiteLLMKeys:
    return LiteLLMKeys(litellm, litellm.ready, litellm)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


def test_a_request_waits_until_litellm_is_there() -> None:
    async def body() -> None:
        litellm = LiteLLM()
        litellm.answers.set()
        asking = asyncio.create_task(keys_of(litellm).owner(CALLER))
        await asyncio.sleep(0.01)
        assert not asking.done() and not litellm.asked
        litellm.is_ready.set()
        owner = await asking
        assert owner.digest == key_digest({"x-api-key": "sk-1"})

    run(body)


@pytest.mark.parametrize("is_ready", [False, True])
def test_it_waits_so_long_and_no_longer(is_ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litellm_keys, "READY_WAIT_S_MAX", 0.01)
    monkeypatch.setattr(litellm_keys, "CHECK_S_MAX", 0.01)

    async def body() -> None:
        litellm = LiteLLM()
        if is_ready:
            litellm.is_ready.set()
        with pytest.raises(RequestError, match=r"0\.01 s") as caught:
            await keys_of(litellm).owner(CALLER)
        assert caught.value.status == 503
        assert caught.value.code == ("key_check_failed" if is_ready else "starting")

    run(body)


def test_a_refusal_is_litellms_own() -> None:
    async def body() -> None:
        litellm = LiteLLM()
        litellm.is_ready.set()
        litellm.answers.set()
        wrong = KeyCaller("GET", "/v1/models", [(b"x-api-key", b"sk-2")])
        with pytest.raises(RequestError, match="It is wrong") as caught:
            await keys_of(litellm).owner(wrong)
        assert caught.value.status == 401

    run(body)


def test_what_an_answer_is_booked_on_is_asked_for_its_group() -> None:
    async def body() -> None:
        litellm = LiteLLM()
        litellm.is_ready.set()
        litellm.answers.set()
        owner, call = await keys_of(litellm).begin(CALLER, "big", "messages", "r1")
        assert (owner.identity, call.data, litellm.asked) == ("sk-1", {"id": "r1"}, ["big"])

    run(body)


@pytest.mark.parametrize(
    ("text", "has_logs", "has_keys", "keeps_texts"),
    [
        ("{}", False, False, False),
        ("litellm_settings: {callbacks: [otel]}", True, False, True),
        ("general_settings: {master_key: sk-1}", True, True, False),
        (
            "litellm_settings: {callbacks: [otel], turn_off_message_logging: true}",
            True,
            False,
            False,
        ),
    ],
)
def test_nothing_is_made_that_the_config_has_no_use_for(
    text: str, has_logs: bool, has_keys: bool, keeps_texts: bool
) -> None:
    async def body() -> None:
        litellm = LiteLLM()
        config = yaml.safe_load(text)
        made = Accounts.of(config, litellm, litellm.ready, checks_keys=has_keys)
        assert (made.logs is not None, made.keys is not None) == (has_logs, has_keys)
        assert made.keeps_texts == keeps_texts
        await made.close(0.01)

    run(body)


def test_a_key_may_use_ollamas_routes_as_far_as_those_of_openai_that_are_like_them() -> None:
    assert route_of("/api/chat") == route_of("/api/generate") == "/v1/chat/completions"
    assert route_of("/api/embed") == route_of("/api/embeddings") == "/v1/embeddings"
    assert route_of("/api/tags") == "/v1/models"


def test_a_key_that_may_list_the_models_may_ask_for_one_of_them() -> None:
    assert route_of("/v1/models/org/name") == route_of("/models/name") == "/v1/models"
    assert (route_of("/models"), route_of("/responses/resp_1")) == ("/models", "/responses/resp_1")
