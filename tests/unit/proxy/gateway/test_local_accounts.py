"""Checks what is told of a local answer, the queue of those that wait, and who needs it."""

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import pytest
import yaml
from hypothesis import given, strategies as st

from hearth.proxy.gateway import local_accounts
from hearth.proxy.gateway.litellm_messages import LocalAnswerLog
from hearth.proxy.gateway.local_accounts import Accounts, LocalAccount, route_of
from hearth.proxy.gateway.routing_table import Deployment
from hearth.proxy.http.http_exchange import ClientBody
from hearth.proxy.pool.worker_link import AnswerStream
from hearth.shared.errors import Overloaded, RequestError
from hearth.shared.wire_messages import Admitted, Delta, Failed, Finished
from tests.helpers.proxy.feed_events import USAGE, ended, request_of

DEPLOYMENT: Final = Deployment("dep", "big", "hearth/qwen", "qwen")
BODY: Final = ClientBody({"messages": [], "seed": 1, "api_key": "x", "stream": True}, 100)


def account_of(*answers: AnswerStream) -> LocalAccount:
    account = LocalAccount(DEPLOYMENT, "r", "chat", BODY, False)
    account.admitted(replace(request_of("session-1"), choices=len(answers)), list(answers))
    return account


def answered(*deltas: Delta) -> AnswerStream:
    answer = AnswerStream("r", lambda _: None)
    answer.receive(Admitted("r", 100))
    for seq, delta in enumerate(deltas):
        answer.receive(replace(delta, seq=seq))
    answer.receive(Finished("r", "tool_calls", None, USAGE))
    return answer


async def recorded(answer: AnswerStream) -> LocalAnswerLog:
    account = LocalAccount(DEPLOYMENT, "r", "chat", BODY, True)
    account.admitted(request_of("s"), [answer])
    assert account.held_bytes == 100
    while not isinstance(await answer.next_event(), Finished):
        pass
    return account.log(None)


@pytest.mark.parametrize("count", [1, 2])
def test_a_log_has_usage_and_times_and_a_prompt_counts_once_for_its_choices(count: int) -> None:
    log = account_of(*[ended() for _ in range(count)]).log(None)
    assert log.usage is not None and (log.error, log.finish_reason) == (None, "stop")
    told = (log.usage.prompt_tokens, log.usage.completion_tokens)
    assert told == (USAGE.prompt_tokens, count * USAGE.completion_tokens)
    assert log.ended_at == pytest.approx(time.time(), abs=60.0)
    assert log.first_token_at is not None
    assert log.asked_at <= log.first_token_at <= log.ended_at
    assert (log.session, log.body, log.text) == ("session-1", {}, "")


def test_an_answers_own_failure_is_told_before_the_replys() -> None:
    failed = AnswerStream("r", lambda _: None)
    failed.receive(Failed("r", 503, "overloaded", "It is full."))
    told = account_of(failed).log(RequestError("broken")).error
    assert told == (503, "The answer ended: overloaded.")
    refused = LocalAccount(DEPLOYMENT, "r", "chat", BODY, True)
    assert not refused.needs_report
    assert refused.log(Overloaded("It is full.")).error == (503, "It is full.")


@given(st.lists(st.tuples(st.sampled_from(["content", "reasoning"]), st.text()), max_size=30))
def test_where_texts_are_kept_the_log_has_what_was_read_and_the_fields_that_logs_know(
    parts: list[tuple[str, str]],
) -> None:
    async def body() -> None:
        log = await recorded(answered(*(Delta("r", 0, channel, text) for channel, text in parts)))
        assert log.text == "".join(text for channel, text in parts if channel == "content")
        assert log.thinking == "".join(text for name, text in parts if name == "reasoning")
        assert log.finish_reason == "tool_calls"
        assert log.body == {"messages": [], "seed": 1, "stream": True}

    asyncio.run(body())


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
    closed: int = 0

    async def connect(self) -> "LiteLLM":
        return self

    async def ask(self, what: str, answer: LocalAnswerLog, wait_s: float, size: int) -> None:
        self.running += 1
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


async def test_each_answer_is_told_once_and_few_at_a_time_and_a_stop_waits_a_little() -> None:
    """One that LiteLLM does not take is counted."""

    litellm = LiteLLM()
    told, lost = made(litellm)
    for number in range(100):
        told.report(replace(ANSWER, request_id=str(number)), 10)
    await asyncio.sleep(0.01)
    assert litellm.running == local_accounts.AT_ONCE_MAX
    litellm.is_open.set()
    await told.close(60)
    assert [each.request_id for each in litellm.taken] == [str(n) for n in range(100)]
    assert (litellm.closed, lost) == (100, [])
    litellm.error = RequestError("no")
    told.report(ANSWER, 10)
    await told.close(60)
    assert (lost, litellm.closed) == (["failed"], 101)
    litellm.is_open.clear()
    told.report(ANSWER, 10)
    await told.close(0.01)
    assert (told.dropped, litellm.closed) == (1, 102)


@pytest.mark.parametrize(("limit", "value"), [("LOGS_MAX", 2), ("LOG_BYTES_MAX", 25)])
async def test_what_has_no_room_is_dropped_but_for_what_a_key_has_reserved(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local_accounts, limit, value)

    litellm = LiteLLM()
    told, lost = made(litellm)
    for _ in range(5):
        told.report(ANSWER, 6)
    assert (told.dropped, lost) == (3, ["dropped"] * 3)
    told.report(ANSWER, 6, cast(Any, litellm))
    litellm.is_open.set()
    await told.close(60)
    assert [each.text for each in litellm.taken] == ["said", "said", ""]
    told.report(ANSWER, 6)
    await told.close(60)
    assert len(litellm.taken) == 4, "there is room again"
    assert "3 were dropped" not in caplog.text and "See to a faster callback" in caplog.text


# ---------------------------------------------------------------- which configs need it


@pytest.mark.parametrize(
    ("config", "tells", "keeps_texts"),
    [
        ("model_list: null", False, False),
        (
            "router_settings: {fallbacks: [{a: [b]}], routing_strategy: simple-shuffle}",
            False,
            False,
        ),
        ("litellm_settings: {callbacks: [otel]}", True, True),
        ("litellm_settings: {success_callback: [langfuse]}", True, True),
        ("litellm_settings: {callbacks: [otel], turn_off_message_logging: true}", True, False),
        ("litellm_settings: {max_budget: 5}", True, False),
        ("router_settings: {provider_budget_config: {openai: {budget_limit: 1}}}", True, False),
        ("router_settings: {routing_strategy: usage-based-routing-v2}", True, False),
        ("model_list: [{model_name: a, litellm_params: {model: hearth/a, rpm: 5}}]", True, False),
    ],
)
def test_of_local_answers_those_are_told_who_need_it(
    config: str, tells: bool, keeps_texts: bool
) -> None:
    found = Accounts(yaml.safe_load(config), cast(Any, None), checks_keys=False)
    assert (found.needs_reports, found.keeps_texts, found.keys) == (tells, keeps_texts, None)


def test_a_key_is_checked_for_the_route_of_litellms_that_ours_is_like() -> None:
    assert route_of("/api/chat") == route_of("/api/generate") == "/v1/chat/completions"
    assert route_of("/api/embed") == route_of("/api/embeddings") == "/v1/embeddings"
    assert route_of("/api/tags") == route_of("/v1/models/org/name") == "/v1/models"
    assert (route_of("/models"), route_of("/responses/resp_1")) == ("/models", "/responses/resp_1")
