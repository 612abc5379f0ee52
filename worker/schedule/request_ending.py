"""Reports a request's cost in the Usage and the log, and records the request in its session."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Final

from hearth.shared.wire_messages import Usage
from hearth.worker.draft.answer_drafter import DraftCounts
from hearth.worker.schedule.request_state import RenderNextPrompt, Request
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.session_context import RequestEnding
from hearth.worker.sessions.session_manager import UNEXPLAINED, SessionManager

log = logging.getLogger(__name__)

SPEED_TOKENS_MIN: Final = 16  # with fewer tokens no speed is reported


def make_usage(request: Request, now: float) -> Usage:
    """Return the request's usage until `now`, a time of `awake_s`. Changes nothing."""
    first, times, state = request.first_token_at, request.times, request.prefill
    cached, prompt = request.cached_tokens, request.prompt_tokens
    read = request.position if first is None else prompt  # tokens prefilled or restored by now
    assert cached <= read <= prompt, (cached, read, prompt)
    received = request.lease.received_at
    drafts = request.drafter.counts if request.drafter is not None else DraftCounts()
    accepted = drafts.accepted.total()
    usage = Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        prefilled_tokens=read - cached,
        completion_tokens=request.completion_tokens,
        reasoning_tokens=request.output.reasoning_tokens,
        source=request.source,
        image_tokens=sum(run.end - run.start for run in request.query.images),
        ttft_ms=round(((now if first is None else first) - received) * 1000),
        finish_ms=round((now - received) * 1000),
        queue_ms=round(((now if times is None else times.began_at) - received) * 1000),
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=drafts.drafted.total() - accepted,
        decode_forwards=request.completion_tokens - accepted,
        warnings=request.warnings,
    )
    if state is None:
        return usage
    return dataclasses.replace(
        usage,
        match=state.plan.kind,
        image_ms=round(state.encoder_s * 1000),
        matched_tokens=min(state.plan.matched, prompt),
        canonical_tokens=state.canonical_tokens,
        idle_tokens=state.idle_tokens,
    )


def answer_row(request: Request, now: float) -> dict[str, Any]:
    """Return the progress of a running answer at `now`, for `/v1/cache`.

    The speed counts from the first token on; None while there are too few tokens.
    """
    first, tokens = request.first_token_at, request.completion_tokens
    taken_s = now - first if first is not None else 0.0
    is_measured = tokens > SPEED_TOKENS_MIN and taken_s > 0
    return {
        "request_id": request.request_id,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "completion_tokens": tokens,
        "tokens_per_s": round((tokens - 1) / taken_s, 1) if is_measured else None,
        "age_s": round(now - request.lease.received_at, 1),
    }


def raised_counters(request: Request) -> frozenset[str]:
    """Return the names of the correctness counters that the request raised."""
    if request.prefill is None:
        return frozenset()
    plan = request.prefill.plan
    counters = {"vlm_retreat": plan.is_retreat, "hybrid_trim_miss": plan.hybrid_trimmed}
    return frozenset(name for name, is_raised in counters.items() if is_raised)


def log_finished(request: Request, reason: str, usage: Usage) -> None:
    """Log the one line of a finished request."""
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


class TurnRecorder:
    """Records requests in their sessions as they end. Owner: the inference thread.

    Invariant: the scheduler calls `ended` once for each request that has a session context.
    """

    def __init__(
        self,
        sessions: SessionManager,
        evictions: Callable[[], int] | None,
        render_next: Callable[[RenderNextPrompt], None],
    ) -> None:
        """`evictions` returns the count of evictions; None for a worker that keeps no KV.

        `render_next` never blocks.
        """
        self._sessions = sessions
        self._evictions = evictions
        self._render_next = render_next

    def ended(self, request: Request, usage: Usage, reason: str, stop: str | None) -> Usage:
        """Record the request; return the usage with the session's kind and the divergence."""
        context = request.session_context
        if context is None:
            return usage
        assert request.slot is None, request.request_id
        # No later request continues an answer that the watchdog ended or the client left.
        is_expired = request.times is not None and request.times.is_expired
        is_broken_off = reason == "cancelled" or is_expired
        parts = request.output.parts
        calls = tuple((call.name, call.arguments) for call in parts.calls)
        ending = RequestEnding(
            request_id=request.request_id,
            text=request.output.text,
            answer=TurnContent(parts.reasoning, parts.content, calls),
            call_ids=tuple(request.deltas.call_ids),
            signature=request.deltas.signature,
            sampled=request.sampled,
            usage=usage,
            limit=request.query.limit if self._evictions is not None else 0,
            is_whole=stop is None and not is_broken_off and not request.output.is_cut,
            is_cancelled=is_broken_off,
            raised=raised_counters(request),
            evictions=self._evictions() if self._evictions is not None else 0,
        )
        divergence = self._sessions.request_ended(context, ending)
        if self._evictions is not None and not ending.is_cancelled:
            self._render_next(RenderNextPrompt(request))
        return dataclasses.replace(usage, divergence=divergence, session_kind=context.kind)
