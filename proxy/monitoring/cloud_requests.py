"""Notes requests that others answered, once each, when LiteLLM has told what they cost."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from hearth.proxy.gateway.litellm_messages import CloudUsage
from hearth.proxy.monitoring.gateway_metrics import ANSWERED, GatewayMetrics
from hearth.proxy.monitoring.recent_requests import CloudRow, RecentRequests

log = logging.getLogger(__name__)

USAGE_WAIT_S_MAX: Final = 10.0  # for LiteLLM's log after the reply's end
WAITING_MAX: Final = 1_024  # requests whose usage has not come, or usages whose request goes on


@dataclass(slots=True)
class CloudRequests:
    """The cloud requests that have ended or been told of, until they are both. Owner: the loop.

    Invariant: each request given to `ended` is noted once, and each usage is in the sums once.
    """

    requests: RecentRequests
    metrics: GatewayMetrics
    served_by: Callable[[str], str]  # of a deployment's id
    _ended: dict[str, tuple[CloudRow, asyncio.TimerHandle]] = field(default_factory=dict)
    _usages: dict[str, CloudUsage] = field(default_factory=dict)  # whose requests go on

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
        self.metrics.spent(self.served_by(usage.deployment_id), usage)
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
            self.metrics.usage_missing()
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
