"""Follows one local answer, and tells LiteLLM's callbacks of it at its end."""

import dataclasses
import time
from dataclasses import dataclass, field

from hearth.proxy.gateway.accounts.answer_log import answer_log
from hearth.proxy.gateway.accounts.litellm_usage import (
    AccountDialect,
    KeyedCall,
    LocalAnswerLog,
    LocalAnswerLogs,
    RecordedAnswer,
)
from hearth.proxy.gateway.config.routing_table import Deployment
from hearth.proxy.http.http_exchange import ClientBody
from hearth.proxy.pool.answer_stream import AnswerStream
from hearth.proxy.request.parsed_request import AnswerEvents, ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Usage


@dataclass(slots=True)
class LocalAccount:
    """What LiteLLM is to be told of one local answer. Owner: the task that serves it.

    Invariant: `end` is called once, whatever came of the answer.
    """

    logs: LocalAnswerLogs
    deployment: Deployment
    request_id: str
    dialect: AccountDialect
    body: ClientBody
    keeps_texts: bool
    call: KeyedCall | None = None  # what a key of LiteLLM's has reserved for it
    tokens: int | None = None  # that were embedded or ranked, where that was asked
    _began_at: float = field(default_factory=awake_s)
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
        if self._request is not None:
            answers = [self._first or self._answers[0], *self._answers[1:]]
            entry = answer_log(
                self._request,
                answers,
                self.deployment,
                self._began_at,
                error,
                request_id=self.request_id,
                call=self.call,
            )
            held = self.body.size if self.keeps_texts else 0
            self.logs.tell(dataclasses.replace(entry, body_bytes=held))
        elif self.tokens is not None:
            self.logs.tell(self._untexted(error, Usage(self.tokens, 0, self.tokens, 0)))
        elif self.call is not None:  # it was refused, and what its key has reserved is given back
            self.logs.tell(self._untexted(error, None))

    def _untexted(self, error: RequestError | None, usage: Usage | None) -> LocalAnswerLog:
        """Return what is told of an answer without a text, or of none."""
        now = time.time()
        return LocalAnswerLog(
            request_id=self.request_id,
            deployment_id=self.deployment.id,
            group=self.deployment.group,
            model=self.deployment.local,
            dialect=self.dialect,
            body={},
            stream=bool(self.body.fields.get("stream")),
            asked_at=now - (awake_s() - self._began_at),
            first_token_at=None,
            ended_at=now,
            usage=usage,
            error=error,
            call=self.call,
        )
