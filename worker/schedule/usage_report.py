"""Computes the Usage of a request that ends, its line in the log, and what a running one tells."""

import logging
from typing import Any, Final

from hearth.shared.wire_messages import Usage
from hearth.worker.schedule.request_state import Request
from hearth.worker.sessions.session_manager import UNEXPLAINED

log = logging.getLogger(__name__)

SPEED_TOKENS_MIN: Final = 16  # the speed of fewer says nothing


def make_usage(request: Request, now: float) -> Usage:
    """Return what the request cost until `now`, by `awake_s`. Changes nothing."""
    first, times, plan = request.first_token_at, request.times, request.plan
    cached, prompt = request.cached_tokens, request.prompt_tokens
    fed = request.position if first is None else prompt  # read or restored by now
    assert cached <= fed <= prompt, (cached, fed, prompt)
    received = request.lease.received_at
    drafted = request.drafter.counts.drafted.total() if request.drafter is not None else 0
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        prefilled_tokens=fed - cached,
        completion_tokens=request.completion_tokens,
        reasoning_tokens=request.output.reasoning_tokens,
        source=request.source,
        image_tokens=sum(run.end - run.start for run in request.query.images),
        ttft_ms=round(((now if first is None else first) - received) * 1000),
        finish_ms=round((now - received) * 1000),
        queue_ms=round(((now if times is None else times.began_at) - received) * 1000),
        match=plan.kind if plan is not None else "none",
        image_ms=round(request.image_s * 1000),
        matched_tokens=min(plan.matched, prompt) if plan is not None else 0,
        canonical_tokens=request.canonical_tokens,
        idle_tokens=request.idle_tokens,
        accepted_prediction_tokens=request.drafted_tokens,
        rejected_prediction_tokens=drafted - request.drafted_tokens,
        decode_forwards=request.completion_tokens - request.drafted_tokens,
        warnings=request.warnings,
    )


def answer_row(request: Request, now: float) -> dict[str, Any]:
    """Return how far an answer is that is written at `now`, and how fast, from its first token on.

    The speed is None of too few tokens to tell.
    """
    first, tokens = request.first_token_at, request.completion_tokens
    taken_s = now - first if first is not None else 0.0
    is_told = tokens > SPEED_TOKENS_MIN and taken_s > 0
    return {
        "request_id": request.request_id,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "completion_tokens": tokens,
        "tokens_per_s": round((tokens - 1) / taken_s, 1) if is_told else None,
        "age_s": round(now - request.lease.received_at, 1),
    }


def raised_counters(request: Request) -> frozenset[str]:
    """Return the names of the cache's counters of correctness that the request raised."""
    plan = request.plan
    if plan is None:
        return frozenset()
    told = {"vlm_retreat": plan.is_retreat, "hybrid_trim_miss": plan.hybrid_trimmed}
    return frozenset(name for name, is_raised in told.items() if is_raised)


def log_finished(request: Request, reason: str, usage: Usage) -> None:
    """Write the one line that the log has of every finished request."""
    raised, divergence = raised_counters(request), usage.divergence or {}
    log.info(
        "finished request=%s reason=%s match=%s source=%s prompt=%d cached=%d prefilled=%d "
        "completion=%d ttft_ms=%d ms=%d vlm_retreat=%d hybrid_trim_miss=%d "
        "exact_key_rejected_by_model_lcp=%d",
        request.request_id,
        reason,
        usage.match,
        usage.source,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.prefilled_tokens,
        usage.completion_tokens,
        usage.ttft_ms,
        usage.finish_ms,
        "vlm_retreat" in raised,
        "hybrid_trim_miss" in raised,
        divergence.get("cause") == UNEXPLAINED,
    )
