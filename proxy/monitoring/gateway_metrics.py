"""Counts who answered requests, why others were asked, and what answers from elsewhere cost.

Every label has a closed set of values: the deployments of LiteLLM's config, and words of ours.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter

ANSWERED: Final = "answered"  # what comes of a whole answer from elsewhere; a local one has more
OTHER: Final = "other"  # what is no name of the config, or no cause of CAUSES
# Why a request went on to another deployment, as header and log have it.
CAUSES: Final = (
    *("overloaded", "prompt_too_long", "model_not_loadable", "worker_lost"),
    *("cloud_error", "timeout", "over_budget", "rate_limited", "content_policy", OTHER),
)
LOST: Final = ("dropped", "failed")


def served_here(model: str) -> str:
    """Return who answered, as header, log and metrics have it, where a local model did."""
    return f"hearth/{model}"


@dataclass(frozen=True, slots=True)
class CloudUsage:
    """What LiteLLM's log of one cloud call says that it cost; `cost` is in US dollars."""

    request_id: str
    deployment_id: str
    prompt_tokens: int
    cached_tokens: int  # of prompt_tokens, read from the provider's cache
    completion_tokens: int
    cost: float


class GatewayMetrics:
    """Counts what the gateway decided. Owner: the event loop. Nothing here waits."""

    def __init__(self, registry: CollectorRegistry, outcomes: Iterable[str]) -> None:
        """`outcomes` are those that a request may end with."""
        self._outcomes = tuple(dict.fromkeys((*outcomes, ANSWERED)))
        self._served_by: set[str] = set()
        self._served = Counter(
            "hearth_served_requests_total",
            "Requests that ended, by who answered, or was asked last, and what came of them.",
            ("served_by", "outcome"),
            registry=registry,
        )
        self._fallbacks = Counter(
            "hearth_fallbacks_total",
            "How often a request went on to another deployment, by why.",
            ("cause",),
            registry=registry,
        )
        self._tokens = {
            name: Counter(f"hearth_cloud_{name}_total", text, ("served_by",), registry=registry)
            for name, text in _CLOUD_TOKENS.items()
        }
        self._cost = Counter(
            "hearth_cloud_cost_dollars_total",
            "What answers from elsewhere cost, by LiteLLM's prices.",
            ("served_by",),
            registry=registry,
        )
        self._lost = Counter(
            "hearth_callback_logs_lost_total",
            "Local answers that LiteLLM's callbacks were not told of.",
            ("why",),
            registry=registry,
        )
        for cause in CAUSES:
            self._fallbacks.labels(cause)
        for why in LOST:
            self._lost.labels(why)

    def know(self, served_by: Iterable[str], *, is_cloud: bool) -> None:
        """Take these as labels, each there from the start: one that appears at 1 has no rate."""
        for name in served_by:
            self._served_by.add(name)
            for outcome in self._outcomes:
                self._served.labels(name, outcome)
            for counter in (*self._tokens.values(), self._cost) if is_cloud else ():
                counter.labels(name)

    def served(self, served_by: str, outcome: str) -> None:
        """Count a request at its end: once, by who answered it or was asked last."""
        word = outcome if outcome in self._outcomes else OTHER
        self._served.labels(self._known(served_by), word).inc()

    def fell_back(self, cause: str) -> None:
        """Count a request that goes on to another deployment."""
        self._fallbacks.labels(cause if cause in CAUSES else OTHER).inc()

    def spent(self, served_by: str, usage: CloudUsage) -> None:
        """Count what one cloud call cost, whether its answer was used or not."""
        name = self._known(served_by)
        for field, counter in self._tokens.items():
            counter.labels(name).inc(getattr(usage, field))
        self._cost.labels(name).inc(usage.cost)

    def log_lost(self, why: str) -> None:
        """Count a local answer that LiteLLM's callbacks were not told of: one of LOST."""
        self._lost.labels(why).inc()

    def _known(self, served_by: str) -> str:
        return served_by if served_by in self._served_by else OTHER


_CLOUD_TOKENS: Final = {
    "prompt_tokens": "Tokens of prompts that were read elsewhere.",
    "cached_tokens": "Of them, those that a provider had kept.",
    "completion_tokens": "Tokens that were written elsewhere.",
}
