"""Remembers each API key's last requests, and sums the cost of all requests of the key.

A request is recorded once, at its end. No text of a request is kept.
"""

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hearth.proxy.api.answer_frames import total_usage
from hearth.proxy.monitoring.metrics import (
    CANCELLED,
    MATCHES,
    PREFILL,
    CloudUsage,
    RequestMetrics,
    among,
    decode_speed,
    failure,
    forwards_per_token,
    match_share,
    outcome_of,
    prefill_speed,
    served_here,
)
from hearth.proxy.pool.worker_link import AnswerStream
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Usage

REQUESTS_MAX: Final = 200  # requests remembered for each API key
RECENT_MAX: Final = 32  # requests listed by /v1/sessions
_OF_PROMPTS: Final = ("prompt_tokens", "cached_tokens", "prefilled_tokens")  # fields of Usage
_OF_ANSWERS: Final = (
    *("completion_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"),
    "decode_forwards",
)
_CLOUD_COUNTS: Final = ("prompt_tokens", "cached_tokens", "completion_tokens")
_DIVERGENCE_FIELDS: Final = ("cause", "rule", "lost", "token", "message", "role", "remedy")

RequestRow = dict[str, Any]  # one request in reports


@dataclass(slots=True)
class RequestTotals:
    """One API key's last requests, and what all of its requests cost, in tokens.

    The figures equal those of /metrics, summed over all labels. Owner: the event loop.
    Invariant: `rows` has the last REQUESTS_MAX requests, numbered from 1 without a gap.
    """

    rows: deque[RequestRow] = field(default_factory=lambda: deque(maxlen=REQUESTS_MAX))
    requests: int = 0
    sums: dict[str, int] = field(  # sums over the usage of all answers
        default_factory=lambda: dict.fromkeys((*_OF_PROMPTS, *_OF_ANSWERS), 0)
    )
    lost: Counter[str] = field(default_factory=Counter)  # tokens read again, by cause
    disconnects: int = 0  # clients that left before their answer was complete
    matches: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(MATCHES, 0)))
    prompts: int = 0  # prompts that had a slot
    shares: float = 0.0  # sum of the prompts' cached shares
    cloud: dict[str, float] = field(  # cloud calls, which `sums` leaves out; cost in $ by LiteLLM
        default_factory=lambda: {**dict.fromkeys(("requests", *_CLOUD_COUNTS), 0), "cost": 0.0}
    )

    def add(self, row: RequestRow) -> None:
        self.requests += 1
        self.rows.append(row | {"number": self.requests})
        if divergence := row["divergence"]:
            self.lost[divergence["cause"]] += divergence["lost"]
        first = self.rows[0]["number"]
        assert first + len(self.rows) - 1 == self.requests, (first, len(self.rows), self.requests)

    def spend(self, usage: Usage, *, is_read: bool) -> None:
        """Count the cost of one answer, and with `is_read` the prompt that was read for it."""
        for name in (*_OF_PROMPTS, *_OF_ANSWERS) if is_read else _OF_ANSWERS:
            self.sums[name] += getattr(usage, name)
        if is_read:
            self.matches[among(MATCHES, usage.match)] += 1
            if (share := match_share(usage)) is not None:
                self.prompts += 1
                self.shares += share

    def totals(self) -> dict[str, Any]:
        """Return the sums since the start, and the time that the cached tokens saved.

        `speed` (of prefill) and `decode_speed` are medians over the remembered requests, in tokens
        per second; None if no request has a speed. `match_share` and `match_tokens` say how much
        of a prompt was cached, on average over the prompts. `forwards_per_token` covers all
        answers, and is 1 for decoding without drafts.
        """
        speed, prompts, sums = self._median("speed"), self.prompts, self.sums
        cached = sums["cached_tokens"]
        return {
            "requests": self.requests,
            **sums,
            "forwards_per_token": forwards_per_token(
                sums["decode_forwards"], sums["completion_tokens"]
            ),
            "hit_rate": cached / sums["prompt_tokens"] if sums["prompt_tokens"] else None,
            "speed": speed,
            "saved_s": cached / speed if speed else None,
            "decode_speed": self._median("decode_speed"),
            "lost_tokens": self.lost.total(),
            "lost_by_cause": dict(self.lost.most_common()),
            "matches": dict(self.matches),
            "match_share": self.shares / prompts if prompts else None,
            "match_tokens": cached / prompts if prompts else None,
            "disconnects": self.disconnects,
            "cloud": dict(self.cloud),
        }

    def _median(self, name: str) -> float | None:
        values = [row[name] for row in self.rows if row[name] is not None]
        return statistics.median(values) if values else None


class RecentRequests:
    """The last requests and the sums of every API key. Owner: the event loop; no method blocks.

    With several API keys each key sees its own requests only; with one key or none, every client
    sees all.
    Invariant: the usage that a worker reported for an answer is in the sums exactly once.
    """

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        # Kept for one key: figures of requests
        self._by_key: dict[str, RequestTotals] = {}
        self.on_change: Callable[[], None] = lambda: None

    def of(self, api_key: str) -> RequestTotals:
        """Return the totals of `api_key`, a digest; "" if all clients share them."""
        return self._by_key.setdefault(api_key, RequestTotals())

    def record(
        self,
        request: ParsedRequest,
        answers: Sequence[AnswerStream],
        started: float,
        broken: RequestError | None = None,
    ) -> None:
        """Count and remember a local request at its end; `started` is its arrival by `awake_s`.

        `answers` are the answers to all choices, of which each prompt counts once, as in the usage
        that clients get. `broken` says why the reply could not be sent, even if all answers are
        whole.
        """
        assert answers and len(answers) % request.choices == 0, (len(answers), request.choices)
        outcome = outcome_of(answers, broken)
        dialect = PREFILL if request.prefill_only else request.dialect
        served_by = served_here(request.served_as or self._metrics.model)
        self._metrics.ended(dialect, outcome, served_by)
        row = _request_row(request, answers, broken) | {"served_by": served_by, "fallback": ""}
        row["wall_ms"] = round((awake_s() - started) * 1000)
        api_key = answers[0].api_key
        self._add(self.of(api_key), row, is_left=outcome == CANCELLED)
        for index, answer in enumerate(answers):
            if answer.usage is not None:
                is_read = index % request.choices == 0
                self.spent(answer.usage, request.served_as, api_key, is_read=is_read)

    def record_unread(self, answer: AnswerStream, usage: Usage) -> None:
        """Count the cost of an answer whose client left before, with the request recorded then."""
        self.spent(usage, answer.model, answer.api_key, is_read=not answer.is_repeat)

    def record_cloud(self, row: RequestRow, usage: CloudUsage | None, api_key: str) -> None:
        """Remember a request that another server answered; `usage` None = not known."""
        totals = self.of(api_key)
        # Nothing was prefilled on this machine.
        row = _UNREPORTED | _CLOUD | {"at": round(time.time(), 3)} | row
        if usage is not None:
            row |= {
                "prompt": usage.prompt_tokens,
                "cached": usage.cached_tokens,
                "completion": usage.completion_tokens,
                "cost": usage.cost,
            }
            for name in (*_CLOUD_COUNTS, "cost"):
                totals.cloud[name] += getattr(usage, name)
        totals.cloud["requests"] += 1
        self._add(totals, row, is_left=row["ended"] == CANCELLED)

    def record_encoded(self, row: RequestRow, api_key: str) -> None:
        """Remember a request of `api_key` for embeddings or scores, at the end of its reply.

        The sums of prompts leave the request out, as they cover the text model alone.
        """
        row = _UNREPORTED | _ENCODED | {"at": round(time.time(), 3)} | row
        self._add(self.of(api_key), row, is_left=row["ended"] == CANCELLED)

    def _add(self, totals: RequestTotals, row: RequestRow, *, is_left: bool) -> None:
        totals.add(row)
        totals.disconnects += is_left
        self.on_change()  # listeners read the change in the loop's next iteration

    def refused(self, error: RequestError, api_key: str) -> None:
        """Count the client of `api_key` if it left before a worker took its request."""
        if failure(error.status) == CANCELLED:
            self.of(api_key).disconnects += 1
            self.on_change()

    def spent(self, usage: Usage, model: str, api_key: str, *, is_read: bool) -> None:
        """Add the cost of an answer of `model` to the metrics and to the sums of `api_key`."""
        self._metrics.spent(usage, model, is_read=is_read)
        self.of(api_key).spend(usage, is_read=is_read)
        self.on_change()

    def recent(self, api_key: str) -> list[RequestRow]:
        """Return the last requests of `api_key`, the newest first."""
        return list(self.of(api_key).rows)[: -RECENT_MAX - 1 : -1]

    def totals(self, api_key: str) -> dict[str, Any]:
        """Return what all requests of `api_key` cost since the start."""
        return self.of(api_key).totals()


def _request_row(
    request: ParsedRequest, answers: Sequence[AnswerStream], broken: RequestError | None
) -> RequestRow:
    """Return the row of a request: figures in tokens and milliseconds, without any text."""
    answer = next((open_answer for open_answer in answers if open_answer.usage is None), answers[0])
    row: RequestRow = {
        "id": answers[0].request_id,
        "at": round(time.time(), 3),
        "dialect": request.dialect,
        "session": request.prompt.speaker.label,
        "client": request.prompt.speaker.client_name,
        "cloud": False,
        "ended": answer.outcome(broken)[0],
        "prompt": answer.prompt_tokens,
        "cached": answer.cached_tokens,
        "prefilled": max(0, answer.done_tokens - answer.cached_tokens),
        **_UNREPORTED,
    }
    usages = [finished.usage for finished in answers if finished.usage is not None]
    if len(usages) < len(answers):  # an answer broke off, so the full cost is unknown
        return row
    usage = total_usage(usages, request.choices)
    return row | {
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "prefilled": usage.prefilled_tokens,
        "completion": usage.completion_tokens,
        "source": usage.source,
        "queue_ms": usage.queue_ms,
        "ttft_ms": usage.ttft_ms,
        "finish_ms": usage.finish_ms,
        "match": among(MATCHES, usage.match),
        "speed": prefill_speed(usages[0]),
        "decode_speed": decode_speed(usages[0]),
        "images": usage.image_tokens,
        "image_ms": usage.image_ms if usage.image_tokens else None,
        "accepted": usage.accepted_prediction_tokens,
        "rejected": usage.rejected_prediction_tokens,
        "forwards": usage.decode_forwards,
        "divergence": divergence_fields(usage.divergence),
    }


# Fields of a row until the worker has reported the usage.
_UNREPORTED: Final[RequestRow] = {
    **{"completion": 0, "source": "none", "match": "none", "images": 0, "divergence": None},
    **{"speed": None, "decode_speed": None, "image_ms": None},
    **{"queue_ms": None, "ttft_ms": None, "finish_ms": None},
    **{"accepted": None, "rejected": None, "forwards": None},
}

# Fields of each row for an embedding or rerank request that its record lacks.
_ENCODED: Final[RequestRow] = {"cloud": False, "cached": 0, "prefilled": 0, "fallback": ""}


_CLOUD: Final[RequestRow] = {"cloud": True, "prompt": 0, "cached": 0, "prefilled": 0, "cost": None}


def divergence_fields(report: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return why tokens were lost, without the text that a worker may report with it."""
    if not report:
        return None
    return {name: report[name] for name in _DIVERGENCE_FIELDS if name in report}
