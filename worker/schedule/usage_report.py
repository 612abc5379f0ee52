"""Computes the Usage of a request that ends: tokens, milliseconds, and its line in the log."""

import logging

from hearth.shared.wire_messages import Usage
from hearth.worker.schedule.request_state import Request

log = logging.getLogger(__name__)


def fed_tokens(request: Request) -> int:
    """Return how many prompt tokens the model has read or had restored by now."""
    return request.position if request.first_token_at is None else request.prompt_tokens


def make_usage(request: Request, now: float) -> Usage:
    """Return what the request cost until `now`, in monotonic seconds. Changes nothing."""
    fed, cached, prompt = fed_tokens(request), request.cached_tokens, request.prompt_tokens
    assert cached <= fed <= prompt, (cached, fed, prompt)
    first, times, plan = request.first_token_at, request.times, request.plan
    received = request.lease.received_at
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        prefilled_tokens=fed - cached,
        completion_tokens=request.completion_tokens,
        reasoning_tokens=request.output.reasoning_tokens,
        source=request.source,
        image_tokens=request.image_tokens,
        ttft_ms=round(((now if first is None else first) - received) * 1000),
        finish_ms=round((now - received) * 1000),
        queue_ms=round(((now if times is None else times.began_at) - received) * 1000),
        match=plan.kind if plan is not None else "none",
    )


def log_finished(request_id: str, reason: str, usage: Usage) -> None:
    """Write the one line that the log has of every finished request."""
    log.info(
        "finished request=%s reason=%s match=%s source=%s prompt=%d cached=%d prefilled=%d "
        "completion=%d ttft_ms=%d ms=%d",
        request_id,
        reason,
        usage.match,
        usage.source,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.prefilled_tokens,
        usage.completion_tokens,
        usage.ttft_ms,
        usage.finish_ms,
    )
