"""Checks what LiteLLM's log of a local answer is made of."""

import asyncio
import time
from dataclasses import dataclass, replace

import pytest

from hearth.proxy.gateway.accounts.answer_log import answer_log
from hearth.proxy.gateway.accounts.litellm_usage import LocalAnswerLog, RecordedAnswer
from hearth.proxy.pool.answer_stream import AnswerStream
from hearth.shared.errors import Overloaded
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Admitted, Delta, Failed, Finished
from tests.helpers.proxy.feed_events import USAGE, ended, request_of


@dataclass(frozen=True)
class Deployment:
    id: str = "dep"
    group: str = "big"
    local: str = "qwen"


def logged(*answers: AnswerStream | RecordedAnswer, **fields: object) -> LocalAnswerLog:
    request = replace(request_of("session-1"), choices=max(1, len(answers)))
    return answer_log(request, answers, Deployment(), awake_s() - 2.0, request_id="r", **fields)  # type: ignore[arg-type]


def test_a_log_has_the_usage_the_names_and_the_session() -> None:
    log = logged(ended())
    assert (log.usage, log.error, log.finish_reason) == (USAGE, None, "stop")
    assert (log.deployment_id, log.group, log.model) == ("dep", "big", "qwen")
    assert (log.request_id, log.session, log.dialect) == ("r", "session-1", "chat")


def test_times_are_of_the_wall_and_in_order() -> None:
    log = logged(ended())
    assert log.ended_at == pytest.approx(time.time(), abs=1.0)
    assert log.ended_at - log.asked_at == pytest.approx(2.0, abs=0.5)
    assert log.first_token_at is not None
    assert log.asked_at <= log.first_token_at <= log.ended_at


def test_a_prompt_counts_once_for_its_choices_and_each_answer_does() -> None:
    log = logged(ended(), ended())
    assert log.usage is not None
    assert log.usage.prompt_tokens == USAGE.prompt_tokens
    assert log.usage.completion_tokens == 2 * USAGE.completion_tokens


def test_texts_are_there_only_where_they_were_recorded() -> None:
    async def body() -> None:
        answer = AnswerStream("r", lambda _: None)
        answer.take(Admitted("r", 100))
        answer.take(Delta("r", 0, "content", "the answer"))
        answer.take(Finished("r", "length", None, USAGE))
        recorded = RecordedAnswer(answer)
        while not isinstance(await recorded.next_event(), Finished):
            pass
        log = logged(recorded)
        assert (log.text, log.finish_reason) == ("the answer", "length")
        assert "the words" in str(log.body)

    asyncio.run(body())
    plain = logged(ended())
    assert (plain.text, plain.body, plain.calls) == ("", {}, ())


def test_a_client_that_left_is_a_failure_without_usage() -> None:
    log = logged(ended(usage=None))
    assert log.usage is None and log.first_token_at is None
    assert log.error is not None and log.error.status == 499


def test_a_worker_that_failed_is_told_with_its_code() -> None:
    answer = AnswerStream("r", lambda _: None)
    answer.take(Failed("r", 503, "worker_unavailable", "It died."))
    log = logged(answer)
    assert log.error is not None
    assert (log.error.status, log.error.code) == (503, "worker_unavailable")


def test_one_that_no_worker_took_is_told_with_why() -> None:
    log = logged(broken=Overloaded("The queue is full."))
    assert log.usage is None and str(log.error) == "The queue is full."
