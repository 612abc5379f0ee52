"""Counts and remembers what the gateway does: fallbacks, and replies of other servers."""

from hearth.proxy.gateway.gateway import CloudReply, GatewayCall
from hearth.proxy.http.http_exchange import ClientGone, HttpExchange
from hearth.proxy.monitoring.cloud_requests import CloudRequests
from hearth.proxy.monitoring.gateway_metrics import ANSWERED
from hearth.proxy.monitoring.recent_requests import CloudRow
from hearth.proxy.monitoring.request_metrics import (
    CANCELLED,
    RequestMetrics,
    outcome_elsewhere,
)
from hearth.proxy.request.session_id import key_digest, session_of
from hearth.shared.suspending_clock import awake_s


class CountedGateway:
    """The gateway's `GatewayRecords`. Owner: the event loop. Nothing here waits."""

    def __init__(self, metrics: RequestMetrics, cloud_requests: CloudRequests) -> None:
        self._metrics = metrics
        self._cloud_requests = cloud_requests

    def fell_back(self, cause: str) -> None:
        """See `GatewayRecords`."""
        self._metrics.gateway.fell_back(cause)

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
        self._metrics.answered_elsewhere(call.dialect, outcome, reply.served_by)
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
        self._cloud_requests.ended(row)
