"""Follows one local answer, and makes LiteLLM's log of it at its end."""

import time
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hearth.proxy.api.answer_frames import WholeChoice, merged
from hearth.proxy.gateway.config.routing_table import Deployment
from hearth.proxy.gateway.litellm_messages import AccountDialect, LocalAnswerLog
from hearth.proxy.gateway.litellm_process import LiteLLMLine
from hearth.proxy.http.http_exchange import ClientBody
from hearth.proxy.pool.answer_stream import AnswerStream
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Usage

# Of a client's body, what LiteLLM's logs have as a prompt and as a model's parameters; `system` and
# `instructions` are the rest of what was asked.
LOGGED: Final = (
    *("messages", "prompt", "input", "query", "user"),
    *("temperature", "top_p", "max_tokens", "max_completion_tokens", "max_output_tokens", "stop"),
    *("seed", "n", "presence_penalty", "frequency_penalty", "tools", "tool_choice", "stream"),
    *("response_format", "reasoning_effort", "system", "instructions"),
)


@dataclass(slots=True)
class LocalAccount:
    """What LiteLLM is to be told of one local answer. Owner: the task that serves it."""

    deployment: Deployment
    request_id: str
    dialect: AccountDialect
    body: ClientBody
    keeps_texts: bool
    line: LiteLLMLine | None = None  # on which LiteLLM has booked it, where it checks keys
    tokens: int | None = None  # that were embedded or ranked, where that was asked
    _began_at: float = field(default_factory=awake_s)
    _request: ParsedRequest | None = None
    _answers: list[AnswerStream] = field(default_factory=list)
    _first: WholeChoice | None = None  # of the first choice, whose text stands for all

    def admitted(self, request: ParsedRequest, answers: list[AnswerStream]) -> None:
        """Take the answers of a request; the text of the first is kept as it is read."""
        self._request, self._answers = request, answers
        if self.keeps_texts:
            self._first = first = WholeChoice()
            # Its log tells no log probabilities, which take 5 kB a token.
            answers[0].recorded = lambda row: first.take(replace(row, logprobs=[]))

    @property
    def is_told(self) -> bool:
        """Whether there is an answer, or a reservation to be given back."""
        return bool(self._answers) or self.tokens is not None or self.line is not None

    @property
    def held_bytes(self) -> int:
        """About how much memory its log takes."""
        return self.body.size if self._first is not None else 0

    def log(self, broken: RequestError | None) -> LocalAnswerLog:
        """Return the log at the answer's end; `broken` is why its client did not get all of it.

        Tokens are of all choices. An answer's own failure is told before the reply's.
        """
        ended_at = time.time()
        asked_at = ended_at - (awake_s() - self._began_at)
        usage = None if self.tokens is None else Usage(self.tokens, 0, self.tokens, 0)
        first_token_at, finish_reason = None, "stop"
        error = None if broken is None else (broken.status, str(broken))
        if self._request is not None:
            told = [answer.usage for answer in self._answers if answer.usage is not None]
            if len(told) == len(self._answers):
                usage = merged(told, self._request.choices)
            first = self._answers[0]
            if usage is not None and usage.completion_tokens:
                wait_s = first.asked_at - self._began_at + usage.ttft_ms / 1000
                first_token_at = min(ended_at, asked_at + max(0.0, wait_s))
            finish_reason = first.ended_as if first.status == 200 else "stop"
            outcomes = (answer.outcome(broken) for answer in self._answers)
            failures = [(status, f"The answer ended: {code}.") for code, status in outcomes]
            error = next((each for each in failures if each[0] != 200), error)
        body = self.body.fields
        return LocalAnswerLog(
            request_id=self.request_id,
            deployment_id=self.deployment.id,
            group=self.deployment.group,
            model=self.deployment.local,
            dialect=self.dialect,
            body={name: body[name] for name in LOGGED if name in body} if self._first else {},
            stream=bool(body.get("stream")),
            asked_at=asked_at,
            first_token_at=first_token_at,
            ended_at=ended_at,
            usage=usage,
            finish_reason=finish_reason,
            error=error,
            session=self._request.prompt.speaker.session if self._request else "",
            **(_texts(self._first) if self._first else {}),
        )


def _texts(choice: WholeChoice) -> dict[str, Any]:
    """Return what LocalAnswerLog has of a choice."""
    calls = [{"id": call.id, "name": call.name, "arguments": text} for call, text in choice.calls]
    return {"calls": calls, "text": choice.text("content"), "thinking": choice.text("reasoning")}
