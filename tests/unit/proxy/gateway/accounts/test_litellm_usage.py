"""Checks the queue of local answers that LiteLLM is told of, and which configs need it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from hearth.proxy.gateway.accounts import litellm_usage
from hearth.proxy.gateway.accounts.litellm_usage import (
    KeyedCall,
    LocalAnswerLog,
    LocalAnswerLogs,
    RecordedAnswer,
    wants_answers,
    wants_texts,
)
from hearth.proxy.pool.answer_stream import AnswerStream
from hearth.shared.wire_messages import Admitted, CallStart, Delta, Finished
from tests.helpers.proxy.feed_events import USAGE

ANSWER = LocalAnswerLog(
    **{"request_id": "r", "deployment_id": "d", "group": "g", "model": "m", "dialect": "chat"},
    **{"body": {"messages": []}, "stream": False, "asked_at": 1.0, "first_token_at": 2.0},
    **{"ended_at": 3.0, "usage": USAGE, "text": "said", "body_bytes": 10},
)


@dataclass
class Loop:
    """Stands for LiteLLM's loop: takes logs when it is let."""

    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    taken: list[LocalAnswerLog] = field(default_factory=list)
    error: Exception | None = None
    running: int = 0
    running_max: int = 0

    async def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return await work()

    async def ready(self) -> None:
        """It is."""

    async def write(self, answer: LocalAnswerLog) -> None:
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        await self.is_open.wait()
        self.running -= 1
        if self.error is not None:
            raise self.error
        self.taken.append(answer)


def logs_of(loop: Loop) -> LocalAnswerLogs:
    return LocalAnswerLogs(loop, loop.ready, loop.write)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


def test_each_answer_is_told_once() -> None:
    async def body() -> None:
        loop = Loop()
        loop.is_open.set()
        logs = logs_of(loop)
        for number in range(5):
            logs.tell(replace(ANSWER, request_id=str(number)))
        await logs.close(5)
        assert sorted(each.request_id for each in loop.taken) == [str(n) for n in range(5)]
        assert (logs.told, logs.failed, logs.dropped) == (5, 0, 0)

    run(body)


def test_a_callback_that_is_slow_holds_few_answers_at_once_and_never_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(litellm_usage, "AT_ONCE_MAX", 2)

    async def body() -> None:
        loop = Loop()
        logs = logs_of(loop)
        for _ in range(10):
            logs.tell(ANSWER)
        await asyncio.sleep(0.01)
        loop.is_open.set()
        await logs.close(5)
        assert (logs.told, loop.running_max) == (10, 2)

    run(body)


@pytest.mark.parametrize("limit", ["LOGS_MAX", "LOG_BYTES_MAX"])
def test_what_has_no_room_is_dropped_counted_and_warned_of(
    limit: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(litellm_usage, limit, 3 if limit == "LOGS_MAX" else 3 * ANSWER.bytes_kept)
    lost: list[str] = []

    async def body() -> None:
        loop = Loop()
        logs = logs_of(loop)
        logs.on_lost = lost.append
        for _ in range(7):
            logs.tell(ANSWER)
        assert (logs.dropped, lost) == (4, ["dropped"] * 4)
        loop.is_open.set()
        await logs.close(5)
        assert logs.told == 3
        logs.tell(ANSWER)  # there is room again
        await logs.close(5)
        assert (logs.told, logs.dropped) == (4, 4)

    with caplog.at_level(logging.WARNING):
        run(body)
    assert [r.args[-1] for r in caplog.records if isinstance(r.args, tuple)] == [1, 2, 4]


def test_what_a_key_has_reserved_is_given_back_however_many_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(litellm_usage, "LOGS_MAX", 1)

    async def body() -> None:
        loop = Loop()
        logs = logs_of(loop)
        keyed = replace(ANSWER, call=KeyedCall(None, {}, None))
        for _ in range(3):
            logs.tell(keyed)
        loop.is_open.set()
        await logs.close(5)
        assert (logs.told, logs.dropped) == (3, 0)
        assert [each.text for each in loop.taken] == ["said", "", ""]

    run(body)


def test_an_answer_that_litellm_does_not_take_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        loop = Loop(error=ValueError("the words of a prompt"))
        loop.is_open.set()
        logs = logs_of(loop)
        logs.tell(ANSWER)
        await logs.close(5)
        assert (logs.told, logs.failed) == (0, 1)

    with caplog.at_level(logging.WARNING):
        run(body)
    (record,) = caplog.records
    assert "ValueError" in record.getMessage() and "the words" not in record.getMessage()


def test_a_stop_waits_a_little_and_drops_the_rest() -> None:
    async def body() -> None:
        logs = logs_of(Loop())
        logs.tell(ANSWER)
        await logs.close(0.01)
        assert (logs.told, logs.dropped) == (0, 1)

    run(body)


# ---------------------------------------------------------------- what was answered


def answered(*deltas: Delta) -> RecordedAnswer:
    answer = AnswerStream("r", lambda _: None)
    answer.take(Admitted("r", 100))
    for seq, delta in enumerate(deltas):
        answer.take(replace(delta, seq=seq))
    answer.take(Finished("r", "tool_calls", None, USAGE))
    return RecordedAnswer(answer)


async def read(answer: RecordedAnswer) -> list[Any]:
    events = [await answer.next_event()]
    while not isinstance(events[-1], Finished):
        events.append(await answer.next_event())
    return events


@given(st.lists(st.tuples(st.sampled_from(["content", "reasoning"]), st.text()), max_size=30))
def test_what_is_recorded_is_what_was_read(parts: list[tuple[str, str]]) -> None:
    async def body() -> None:
        answer = answered(*(Delta("r", 0, channel, text) for channel, text in parts))
        await read(answer)
        assert answer.text == "".join(text for channel, text in parts if channel == "content")
        assert answer.thinking == "".join(text for name, text in parts if name == "reasoning")
        assert (answer.finish_reason, answer.request_id) == ("tool_calls", "r")

    run(body)


def test_calls_are_recorded_each_with_its_arguments() -> None:
    async def body() -> None:
        answer = answered(
            Delta("r", 0, "tool_call", '{"a":', call=CallStart("c1", "read")),
            Delta("r", 0, "tool_call", " 1}"),
            Delta("r", 0, "tool_call", "{}", call=CallStart("c2", "write")),
        )
        await read(answer)
        assert answer.whole_calls() == [
            {"id": "c1", "name": "read", "arguments": '{"a": 1}'},
            {"id": "c2", "name": "write", "arguments": "{}"},
        ]

    run(body)


# ---------------------------------------------------------------- which configs need it

NEEDS_NOTHING = """
model_list: [{model_name: a, litellm_params: {model: openai/a, api_key: os.environ/KEY}}]
router_settings: {fallbacks: [{a: [b]}], routing_strategy: simple-shuffle}
litellm_settings: {drop_params: true}
"""


def test_where_no_callback_and_no_budget_is_nothing_is_told() -> None:
    for config in ({}, {"model_list": None}, yaml.safe_load(NEEDS_NOTHING)):
        assert not wants_answers(config)
        assert not wants_texts(config)


@pytest.mark.parametrize(
    "config",
    [
        "litellm_settings: {callbacks: [otel]}",
        "litellm_settings: {success_callback: [langfuse]}",
        "litellm_settings: {failure_callback: [sentry], turn_off_message_logging: true}",
        "litellm_settings: {max_budget: 5}",
        "router_settings: {provider_budget_config: {openai: {budget_limit: 1, time_period: 1d}}}",
        "router_settings: {routing_strategy: usage-based-routing-v2}",
        "model_list: [{model_name: a, litellm_params: {model: hearth/a, rpm: 5}}]",
        "model_list: [{model_name: a, litellm_params: {model: hearth/a, max_budget: 1}}]",
    ],
)
def test_each_of_these_is_told_of_local_answers(config: str) -> None:
    assert wants_answers(yaml.safe_load(config))


def test_texts_are_kept_for_callbacks_that_may_see_them_only() -> None:
    callbacks: dict[str, Any] = {"callbacks": ["otel"]}
    assert wants_texts({"litellm_settings": callbacks})
    assert not wants_texts({"litellm_settings": callbacks | {"turn_off_message_logging": True}})
    assert not wants_texts({"general_settings": {"master_key": "sk-1"}})
