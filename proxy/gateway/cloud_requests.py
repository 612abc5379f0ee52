"""Counts and remembers requests that others answered."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hearth.proxy.gateway.cloud_bodies import CloudDialect
from hearth.proxy.http.http_exchange import ClientGone, HttpExchange
from hearth.proxy.monitoring.metrics import (
    ANSWERED,
    CANCELLED,
    CloudUsage,
    RequestMetrics,
    outcome_elsewhere,
)
from hearth.proxy.monitoring.recent_requests import RecentRequests, RequestRow
from hearth.proxy.request.session_id import key_digest, session_of
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s

log = logging.getLogger(__name__)

USAGE_WAIT_S_MAX: Final = 10.0  # for LiteLLM's log after the reply's end
WAITING_MAX: Final = 1_024  # requests whose usage has not come, or usages whose request goes on


@dataclass(slots=True)
class CloudReply:
    """What came of a call to another server, once it has ended. Times are those of `awake_s`."""

    dialect: CloudDialect
    asked: Mapping[str, Any]  # the client's body
    served_by: str
    fallback: str  # who failed before, as the header has it
    began_at: float
    status: int = 0  # 0 = it has not answered
    first_byte_at: float | None = None
    error: RequestError | None = None  # it refused, failed or broke off, or its client left


@dataclass(slots=True)
class CloudRequests:
    """Counts what the gateway does; notes a request elsewhere once LiteLLM has told its cost.

    Owner: the event loop. Nothing here waits.
    Invariant: each request given to `ended` is noted once, and each usage is in the sums once.
    """

    requests: RecentRequests
    metrics: RequestMetrics
    served_by: Callable[[str], str]  # of a deployment's id
    # Whose usage has not come, each with its key and whether it was a stream
    _ended: dict[str, tuple[RequestRow, str, bool]] = field(default_factory=dict)
    _usages: dict[str, CloudUsage] = field(default_factory=dict)  # whose requests go on

    def fell_back(self, cause: str) -> None:
        """Count a request that goes on to another deployment."""
        self.metrics.gateway.fell_back(cause)

    def cloud_ended(self, exchange: HttpExchange, reply: CloudReply) -> None:
        """Take a reply at its end. A count of tokens is no request for text, and is not noted."""
        if reply.dialect in ("messages_count", "responses_count"):
            return
        exchange.is_counted = True
        error = reply.error or exchange.broken_by
        is_gone = isinstance(error, ClientGone)
        has_broken = error is not None and (is_gone or reply.status < 400)
        status = error.status if error is not None and has_broken else reply.status
        seen = reply.status if exchange.has_started and not is_gone else status
        outcome = outcome_elsewhere(seen, is_whole=error is None)
        self.metrics.ended(reply.dialect, outcome, reply.served_by)
        key = key_digest(exchange.headers)
        speaker = session_of(exchange.headers, reply.asked, key)
        began, first = reply.began_at, reply.first_byte_at
        row = {
            "id": exchange.request_id,
            "dialect": reply.dialect,
            "session": speaker.label,
            "client": speaker.client_name,
            "served_by": reply.served_by,
            "fallback": reply.fallback,
            "ended": ANSWERED if error is None else CANCELLED if is_gone else error.code,
            "wall_ms": round((awake_s() - began) * 1000),
            "ttft_ms": None if first is None else round((first - began) * 1000),
        }
        self.ended(row, key, bool(reply.asked.get("stream")))

    def ended(self, row: RequestRow, key: str = "", is_stream: bool = False) -> None:
        """Take a request of `key` at its reply's end; it is noted once its usage is known."""
        usage = self._usages.pop(row["id"], None)
        self._ended[row["id"]] = row, key, is_stream
        if usage is not None or len(self._ended) > WAITING_MAX:
            self._note(row["id"], usage)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(USAGE_WAIT_S_MAX, self._note, row["id"])

    def told(self, usage: CloudUsage) -> None:
        """Take what LiteLLM says that a call cost; a failed one may come before the used one."""
        self.metrics.gateway.spent(self.served_by(usage.deployment_id), usage)
        if usage.request_id in self._ended:
            self._note(usage.request_id, usage)
            return
        earlier = self._usages.pop(usage.request_id, None)
        self._usages[usage.request_id] = usage if earlier is None else _sum(earlier, usage)
        if len(self._usages) > WAITING_MAX:  # of requests that nobody will end
            del self._usages[next(iter(self._usages))]

    def close(self) -> None:
        """Note what has ended, without its usage: the server stops."""
        for request_id in list(self._ended):
            self._note(request_id)

    def _note(self, request_id: str, usage: CloudUsage | None = None) -> None:
        """Note a request that has ended, unless it is noted."""
        if request_id not in self._ended:
            return
        row, key, is_stream = self._ended.pop(request_id)
        self.requests.note_cloud(row, usage, key)
        names = ("prompt_tokens", "cached_tokens", "completion_tokens")
        log.info(
            "request id=%s dialect=%s stream=%d served_by=%s fallback=%s prompt=%s cached=%s "
            "completion=%s ended=%s wall_ms=%d",
            *(request_id, row["dialect"], is_stream, row["served_by"], row["fallback"] or "-"),
            *(getattr(usage, name, "-") for name in names),
            *(row["ended"], row["wall_ms"]),
        )


def _sum(one: CloudUsage, other: CloudUsage) -> CloudUsage:
    return CloudUsage(
        other.request_id,
        other.deployment_id,
        one.prompt_tokens + other.prompt_tokens,
        one.cached_tokens + other.cached_tokens,
        one.completion_tokens + other.completion_tokens,
        one.cost + other.cost,
    )
