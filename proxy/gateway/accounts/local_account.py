"""Follows one local answer, and tells LiteLLM's callbacks of it at its end."""

import time
from dataclasses import dataclass, field

from hearth.proxy.api.multi_choice_stream import merged
from hearth.proxy.gateway.accounts.litellm_usage import (
    KeyedCall,
    LocalAnswerLog,
    LocalAnswerLogs,
    RecordedAnswer,
)
from hearth.proxy.gateway.routing_table import Deployment
from hearth.proxy.http.http_exchange import ClientBody
from hearth.proxy.pool.answer_stream import AnswerStream
from hearth.proxy.request.parsed_request import AnswerEvents, Dialect, ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Usage


@dataclass(slots=True)
class LocalAccount:
    """What LiteLLM is to be told of one local answer. Owner: the task that serves it.

    Invariant: `end` is called once, whatever came of the answer.
    """

    logs: LocalAnswerLogs
    deployment: Deployment
    request_id: str
    dialect: Dialect
    body: ClientBody
    keeps_texts: bool
    call: KeyedCall | None = None  # what a key of LiteLLM's has reserved for it
    _asked_at: float = field(default_factory=time.time)
    _request: ParsedRequest | None = None
    _answers: list[AnswerStream] = field(default_factory=list)
    _first: RecordedAnswer | None = None  # of the first choice, whose text stands for all

    def admitted(self, request: ParsedRequest, answers: list[AnswerStream]) -> AnswerEvents:
        """Take the answers of a request; return the first as it is to be read."""
        self._request, self._answers = request, answers
        if not self.keeps_texts:
            return answers[0]
        self._first = RecordedAnswer(answers[0])
        return self._first

    def end(self, error: RequestError | None) -> None:
        """Tell of the answer; `error` is why its client got none, or not all of it."""
        if self._request is None:
            if self.call is None:
                return  # it was refused, and reserved nothing
            self.logs.tell(self._log(None, error))
            return
        usages = [answer.usage for answer in self._answers if answer.usage is not None]
        is_whole = len(usages) == len(self._answers)
        usage = merged(usages, self._request.choices) if is_whole else None
        self.logs.tell(self._log(usage, error))

    def _log(self, usage: Usage | None, error: RequestError | None) -> LocalAnswerLog:
        first, request, now = self._first, self._request, time.time()
        is_begun = usage is not None and usage.completion_tokens > 0
        assert usage is None or request is not None, "usage is of an answer"
        return LocalAnswerLog(
            request_id=self.request_id,
            deployment_id=self.deployment.id,
            group=self.deployment.group,
            model=self.deployment.local,
            dialect=self.dialect,
            body=self.body.fields if self.keeps_texts else {},
            stream=bool(self.body.fields.get("stream")),
            asked_at=self._asked_at,
            first_token_at=self._asked_at + usage.ttft_ms / 1000 if usage and is_begun else None,
            ended_at=now,
            usage=usage,
            finish_reason=first.finish_reason if first else "stop",
            text=first.text if first else "",
            thinking=first.thinking if first else "",
            calls=first.whole_calls() if first else (),
            error=error,
            session=request.prompt.speaker.session if request else "",
            body_bytes=self.body.size if self.keeps_texts else 0,
            call=self.call,
        )
