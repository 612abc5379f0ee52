"""Counts and remembers what the gateway does: fallbacks, and requests that others answered."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from hearth.proxy.gateway.gateway import CloudReply, GatewayCall
from hearth.proxy.gateway.litellm_messages import CloudUsage
from hearth.proxy.http.http_exchange import ClientGone, HttpExchange
from hearth.proxy.monitoring.gateway_metrics import ANSWERED
from hearth.proxy.monitoring.recent_requests import CloudRow, RecentRequests
from hearth.proxy.monitoring.request_metrics import CANCELLED, RequestMetrics, outcome_elsewhere
from hearth.proxy.request.session_id import key_digest, session_of
from hearth.shared.suspending_clock import awake_s

log = logging.getLogger(__name__)

USAGE_WAIT_S_MAX: Final = 10.0  # for LiteLLM's log after the reply's end
WAITING_MAX: Final = 1_024  # requests whose usage has not come, or usages whose request goes on


@dataclass(slots=True)
class CloudRequests:
    """The gateway's `GatewayRecords`. Owner: the event loop. Nothing here waits.

    A request that others answered is noted once LiteLLM has told what it cost.
    Invariant: each request given to `ended` is noted once, and each usage is in the sums once.
    """

    requests: RecentRequests
    metrics: RequestMetrics
    served_by: Callable[[str], str]  # of a deployment's id
    _ended: dict[str, tuple[CloudRow, asyncio.TimerHandle]] = field(default_factory=dict)
    _usages: dict[str, CloudUsage] = field(default_factory=dict)  # whose requests go on

    def fell_back(self, cause: str) -> None:
        """See `GatewayRecords`."""
        self.metrics.gateway.fell_back(cause)

    def cloud_ended(self, exchange: HttpExchange, call: GatewayCall, reply: CloudReply) -> None:
        """See `GatewayRecords`. A count of tokens is no request for text, and is not noted."""
        if call.dialect in ("messages_count", "responses_count"):
            return
        exchange.is_counted = True
        error = reply.error or exchange.broken_by
        status = error.status if error is not None and reply.status < 400 else reply.status
        is_gone = isinstance(error, ClientGone)
        status = ClientGone().status if is_gone else status
        seen = reply.status if exchange.has_started and not is_gone else status
        outcome = outcome_elsewhere(seen, is_whole=error is None)
        self.metrics.answered_elsewhere(call.dialect, outcome, reply.served_by)
        key = key_digest(exchange.headers)
        ended = ANSWERED if error is None else error.code
        speaker = session_of(exchange.headers, call.body, key)
        began, first = reply.began_at, reply.first_byte_at
        row = CloudRow(
            request_id=exchange.request_id,
            dialect=call.dialect,
            stream=bool(call.body.get("stream")),
            key=key,
            session=speaker.label,
            client=speaker.client_name,
            served_by=reply.served_by,
            fallback=reply.fallback,
            ended=CANCELLED if is_gone else ended,
            status=status,
            wall_ms=round((awake_s() - began) * 1000),
            ttft_ms=None if first is None else round((first - began) * 1000),
        )
        self.ended(row)

    def ended(self, row: CloudRow) -> None:
        """Take a request at the end of its reply; it is noted once its usage is known."""
        assert row.request_id not in self._ended, row.request_id
        usage = self._usages.pop(row.request_id, None)
        if usage is not None or len(self._ended) >= WAITING_MAX:
            self._note(row, usage)
            return
        loop = asyncio.get_running_loop()
        timer = loop.call_later(USAGE_WAIT_S_MAX, self._give_up, row.request_id)
        self._ended[row.request_id] = row, timer

    def told(self, usage: CloudUsage) -> None:
        """Take what LiteLLM says that a call cost; a failed one may come before the used one."""
        self.metrics.gateway.spent(self.served_by(usage.deployment_id), usage)
        if found := self._ended.pop(usage.request_id, None):
            row, timer = found
            timer.cancel()
            self._note(row, usage)
            return
        earlier = self._usages.pop(usage.request_id, None)
        self._usages[usage.request_id] = usage if earlier is None else _sum(earlier, usage)
        if len(self._usages) > WAITING_MAX:  # of requests that nobody will end
            del self._usages[next(iter(self._usages))]

    def close(self) -> None:
        """Note what has ended, without its usage: the server stops."""
        for request_id in list(self._ended):
            self._give_up(request_id)

    def _give_up(self, request_id: str) -> None:
        row, timer = self._ended.pop(request_id)
        timer.cancel()
        self._note(row, None)

    def _note(self, row: CloudRow, usage: CloudUsage | None) -> None:
        if usage is None and row.ended == ANSWERED:
            self.metrics.gateway.usage_missing()
        self.requests.note_cloud(row, usage)
        log.info(
            "request id=%s dialect=%s stream=%d served_by=%s fallback=%s prompt=%s cached=%s "
            "completion=%s ended=%s wall_ms=%d",
            row.request_id,
            row.dialect,
            row.stream,
            row.served_by,
            row.fallback or "-",
            *_tokens(usage),
            row.ended,
            row.wall_ms,
        )


def _tokens(usage: CloudUsage | None) -> tuple[int | str, int | str, int | str]:
    if usage is None:
        return "-", "-", "-"
    return usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens


def _sum(one: CloudUsage, other: CloudUsage) -> CloudUsage:
    return CloudUsage(
        other.request_id,
        other.deployment_id,
        one.prompt_tokens + other.prompt_tokens,
        one.cached_tokens + other.cached_tokens,
        one.completion_tokens + other.completion_tokens,
        one.cost + other.cost,
    )
