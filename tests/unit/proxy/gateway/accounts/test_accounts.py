"""Checks what is told of a local answer, the queue of those that wait, and who needs it."""

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import pytest
import yaml
from hypothesis import given, strategies as st

from hearth.proxy.gateway.accounts import accounts
from hearth.proxy.gateway.accounts.accounts import Accounts
from hearth.proxy.gateway.accounts.litellm_keys import route_of
from hearth.proxy.gateway.accounts.local_account import LocalAccount, RecordedAnswer
from hearth.proxy.gateway.config.routing_table import Deployment
from hearth.proxy.gateway.litellm_messages import LocalAnswerLog
from hearth.proxy.http.http_exchange import ClientBody
from hearth.proxy.pool.answer_stream import AnswerStream
from hearth.shared.errors import Overloaded, RequestError
from hearth.shared.wire_messages import Admitted, CallStart, Delta, Failed, Finished
from tests.helpers.proxy.feed_events import USAGE, ended, request_of

DEPLOYMENT: Final = Deployment("dep", "big", "hearth/qwen", "qwen")
BODY: Final = ClientBody({"messages": [], "seed": 1, "api_key": "x", "stream": True}, 100)


def account_of(*answers: AnswerStream, keeps_texts: bool = False) -> LocalAccount:
    account = LocalAccount(DEPLOYMENT, "r", "chat", BODY, keeps_texts)
    request = replace(request_of("session-1"), choices=max(1, len(answers)))
    if answers:
        account.admitted(request, list(answers))
    return account


def answered(*deltas: Delta) -> AnswerStream:
    answer = AnswerStream("r", lambda _: None)
    answer.take(Admitted("r", 100))
    for seq, delta in enumerate(deltas):
        answer.take(replace(delta, seq=seq))
    answer.take(Finished("r", "tool_calls", None, USAGE))
    return answer


async def read(answer: RecordedAnswer) -> dict[str, Any]:
    while not isinstance(await answer.next_event(), Finished):
        pass
    return answer.told()


def test_a_log_has_usage_names_session_and_times_in_order() -> None:
    log = account_of(ended()).log(None)
    assert (log.usage, log.error, log.finish_reason) == (USAGE, None, "stop")
    assert (log.deployment_id, log.group, log.model) == ("dep", "big", "qwen")
    assert (log.request_id, log.session, log.dialect, log.stream) == (
        "r",
        "session-1",
        "chat",
        True,
    )
    assert log.ended_at == pytest.approx(time.time(), abs=1.0)
    assert log.first_token_at is not None
    assert log.asked_at <= log.first_token_at <= log.ended_at
    assert (log.body, log.text) == ({}, "")


def test_a_prompt_counts_once_for_its_choices_and_each_answer_does() -> None:
    log = account_of(ended(), ended()).log(None)
    assert log.usage is not None
    assert log.usage.prompt_tokens == USAGE.prompt_tokens
    assert log.usage.completion_tokens == 2 * USAGE.completion_tokens


def test_where_texts_are_kept_the_log_has_them_and_the_fields_that_logs_know() -> None:
    async def body() -> None:
        account = LocalAccount(DEPLOYMENT, "r", "chat", BODY, True)
        answer = answered(Delta("r", 0, "content", "the answer"))
        recorded = account.admitted(request_of("s"), [answer])
        await read(cast(RecordedAnswer, recorded))
        log = account.log(None)
        assert (log.text, log.finish_reason) == ("the answer", "tool_calls")
        assert log.body == {"messages": [], "seed": 1, "stream": True}
        assert account.held_bytes == 100

    asyncio.run(body())


def test_an_answers_own_failure_is_told_before_the_replys() -> None:
    failed = AnswerStream("r", lambda _: None)
    failed.take(Failed("r", 503, "overloaded", "It is full."))
    assert account_of(failed).log(RequestError("broken")).error == (
        503,
        "The answer ended: overloaded.",
    )
    refused = LocalAccount(DEPLOYMENT, "r", "chat", BODY, True)
    assert not refused.is_told
    assert refused.log(Overloaded("It is full.")).error == (503, "It is full.")
    refused.tokens = 40
    assert refused.is_told
    usage = refused.log(None).usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (40, 0)


@given(st.lists(st.tuples(st.sampled_from(["content", "reasoning"]), st.text()), max_size=30))
def test_what_is_recorded_is_what_was_read(parts: list[tuple[str, str]]) -> None:
    async def body() -> None:
        told = await read(
            RecordedAnswer(answered(*(Delta("r", 0, channel, text) for channel, text in parts)))
        )
        assert told["text"] == "".join(text for channel, text in parts if channel == "content")
        assert told["thinking"] == "".join(text for name, text in parts if name == "reasoning")

    asyncio.run(body())


def test_calls_are_recorded_each_with_its_arguments() -> None:
    deltas = (
        Delta("r", 0, "tool_call", '{"a":', call=CallStart("c1", "read")),
        Delta("r", 0, "tool_call", " 1}"),
        Delta("r", 0, "tool_call", "{}", call=CallStart("c2", "write")),
    )
    told = asyncio.run(read(RecordedAnswer(answered(*deltas))))
    assert told["calls"] == [
        {"id": "c1", "name": "read", "arguments": '{"a": 1}'},
        {"id": "c2", "name": "write", "arguments": "{}"},
    ]


# ---------------------------------------------------------------- the queue

ANSWER: Final = LocalAnswerLog(
    **{"request_id": "r", "deployment_id": "d", "group": "g", "model": "m", "dialect": "chat"},
    **{"body": {"messages": []}, "stream": False, "asked_at": 1.0, "first_token_at": 2.0},
    **{"ended_at": 3.0, "usage": USAGE, "text": "said"},
)


@dataclass
class LiteLLM:
    """Stands for LiteLLM's process and each line to it: takes logs when it is let."""

    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    taken: list[LocalAnswerLog] = field(default_factory=list)
    error: RequestError | None = None
    running: int = 0
    running_max: int = 0
    closed: int = 0

    async def line(self) -> "LiteLLM":
        return self

    async def ask(self, what: str, answer: LocalAnswerLog, wait_s: float, size: int) -> None:
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        await self.is_open.wait()
        self.running -= 1
        if self.error is not None:
            raise self.error
        self.taken.append(answer)

    def close(self) -> None:
        self.closed += 1


def made(litellm: LiteLLM) -> tuple[Accounts, list[str]]:
    lost: list[str] = []
    found = Accounts({}, cast(Any, litellm), checks_keys=True)
    found.on_lost = lost.append
    return found, lost


def test_each_answer_is_told_once_and_few_at_a_time() -> None:
    async def body() -> None:
        litellm = LiteLLM()
        told, lost = made(litellm)
        for number in range(100):
            told.tell(replace(ANSWER, request_id=str(number)), 10)
        await asyncio.sleep(0.01)
        assert litellm.running == accounts.AT_ONCE_MAX
        litellm.is_open.set()
        await told.close(60)
        assert [each.request_id for each in litellm.taken] == [str(n) for n in range(100)]
        assert (litellm.running_max, litellm.closed, lost) == (accounts.AT_ONCE_MAX, 100, [])

    asyncio.run(body())


@pytest.mark.parametrize(("limit", "value"), [("LOGS_MAX", 2), ("LOG_BYTES_MAX", 25)])
def test_what_has_no_room_is_dropped_but_for_what_a_key_has_reserved(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accounts, limit, value)

    async def body() -> None:
        litellm = LiteLLM()
        told, lost = made(litellm)
        for _ in range(5):
            told.tell(ANSWER, 10)
        assert (told.dropped, lost) == (3, ["dropped"] * 3)
        told.tell(ANSWER, 10, cast(Any, litellm))
        litellm.is_open.set()
        await told.close(60)
        assert [each.text for each in litellm.taken] == ["said", "said", ""]
        told.tell(ANSWER, 10)
        await told.close(60)
        assert len(litellm.taken) == 4, "there is room again"

    asyncio.run(body())
    assert "3 were dropped" not in caplog.text and "See to a faster callback" in caplog.text


def test_an_answer_that_litellm_does_not_take_is_counted_and_a_stop_waits_a_little() -> None:
    async def body() -> None:
        litellm = LiteLLM(error=RequestError("no"))
        litellm.is_open.set()
        told, lost = made(litellm)
        told.tell(ANSWER, 10)
        await told.close(60)
        assert (lost, litellm.closed) == (["failed"], 1)
        litellm.is_open.clear()
        told.tell(ANSWER, 10)
        await told.close(0.01)
        assert (told.dropped, litellm.closed) == (1, 2)

    asyncio.run(body())


# ---------------------------------------------------------------- which configs need it

NEEDS_NOTHING: Final = """
model_list: [{model_name: a, litellm_params: {model: openai/a, api_key: os.environ/KEY}}]
router_settings: {fallbacks: [{a: [b]}], routing_strategy: simple-shuffle}
litellm_settings: {drop_params: true}
"""
CALLBACKS: Final = "litellm_settings: {callbacks: [otel]}"
DISCREET: Final = "litellm_settings: {callbacks: [otel], turn_off_message_logging: true}"


@pytest.mark.parametrize("config", ["{}", "model_list: null", NEEDS_NOTHING])
def test_where_no_callback_and_no_budget_is_nothing_is_told(config: str) -> None:
    found = Accounts(yaml.safe_load(config), cast(Any, None), checks_keys=False)
    assert (found.tells, found.keeps_texts, found.keys) == (False, False, None)


@pytest.mark.parametrize(
    ("config", "keeps_texts"),
    [
        (CALLBACKS, True),
        (DISCREET, False),
        ("litellm_settings: {success_callback: [langfuse]}", True),
        ("litellm_settings: {failure_callback: [sentry], turn_off_message_logging: true}", False),
        ("litellm_settings: {max_budget: 5}", False),
        ("router_settings: {provider_budget_config: {openai: {budget_limit: 1}}}", False),
        ("router_settings: {routing_strategy: usage-based-routing-v2}", False),
        ("model_list: [{model_name: a, litellm_params: {model: hearth/a, rpm: 5}}]", False),
        ("model_list: [{model_name: a, litellm_params: {model: hearth/a, max_budget: 1}}]", False),
    ],
)
def test_each_of_these_is_told_of_local_answers(config: str, keeps_texts: bool) -> None:
    found = Accounts(yaml.safe_load(config), cast(Any, None), checks_keys=False)
    assert (found.tells, found.keeps_texts) == (True, keeps_texts)


def test_a_key_is_checked_for_the_route_of_litellms_that_ours_is_like() -> None:
    assert route_of("/api/chat") == route_of("/api/generate") == "/v1/chat/completions"
    assert route_of("/api/embed") == route_of("/api/embeddings") == "/v1/embeddings"
    assert route_of("/api/tags") == "/v1/models"
    assert route_of("/v1/models/org/name") == route_of("/models/name") == "/v1/models"
    assert (route_of("/models"), route_of("/responses/resp_1")) == ("/models", "/responses/resp_1")
