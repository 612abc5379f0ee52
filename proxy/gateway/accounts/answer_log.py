"""Makes LiteLLM's log of a local answer out of the request and of what its worker told."""

import time
from collections.abc import Sequence

from hearth.proxy.api.multi_choice_stream import merged
from hearth.proxy.gateway.accounts.litellm_usage import (
    KeyedCall,
    LocalAnswerLog,
    RecordedAnswer,
)
from hearth.proxy.gateway.config.routing_table import Deployment
from hearth.proxy.pool.answer_stream import AnswerStream
from hearth.proxy.request.parsed_request import ParsedRequest, crossed_dialect
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s

Answer = AnswerStream | RecordedAnswer


def answer_log(
    request: ParsedRequest,
    answers: Sequence[Answer],
    deployment: Deployment,
    started: float,
    broken: RequestError | None = None,
    *,
    request_id: str,
    call: KeyedCall | None = None,
) -> LocalAnswerLog:
    """Return the log of a request at its end; it came at `started` (`awake_s`).

    `answers` are those to its choices, none where a worker did not take it. `broken` is why it
    was refused, or why the reply did not get out. Texts are those of the first choice, and there
    only where it is a RecordedAnswer; tokens are of all choices.
    """
    ended_at, taken_s = time.time(), awake_s() - started
    asked_at = ended_at - taken_s
    usages = [answer.usage for answer in answers if answer.usage is not None]
    usage = merged(usages, request.choices) if answers and len(usages) == len(answers) else None
    first_token_at = None
    if usage is not None and usage.completion_tokens:
        wait_s = answers[0].asked_at - started + usage.ttft_ms / 1000
        first_token_at = min(ended_at, asked_at + max(0.0, wait_s))
    first = answers[0] if answers and isinstance(answers[0], RecordedAnswer) else None
    return LocalAnswerLog(
        request_id=request_id,
        deployment_id=deployment.id,
        group=deployment.group,
        model=deployment.local,
        dialect=crossed_dialect(request.dialect),
        body=request.body if first is not None else {},
        stream=request.stream,
        asked_at=asked_at,
        first_token_at=first_token_at,
        ended_at=ended_at,
        usage=usage,
        finish_reason=_finish_reason(answers),
        text=first.text if first is not None else "",
        thinking=first.thinking if first is not None else "",
        calls=first.whole_calls() if first is not None else (),
        error=_error(answers, broken),
        session=request.prompt.speaker.session,
        call=call,
    )


def _finish_reason(answers: Sequence[Answer]) -> str:
    return answers[0].ended_as if answers and answers[0].status == 200 else "stop"


def _error(answers: Sequence[Answer], broken: RequestError | None) -> RequestError | None:
    """Return why a request failed: an answer's own failure is told before the reply's."""
    for answer in answers:
        code, status = answer.outcome(broken)
        if status != 200:
            return RequestError(f"The answer ended: {code}.", status=status, code=code)
    return broken
