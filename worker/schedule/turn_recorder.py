"""Records each ended request in its session, and has its next prompt rendered."""

import dataclasses
from collections.abc import Callable

from hearth.shared.wire_messages import Usage
from hearth.worker.schedule.request_state import RenderNextPrompt, Request
from hearth.worker.schedule.usage_report import raised_counters
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.session_manager import SessionManager
from hearth.worker.sessions.session_visit import RequestEnding


class TurnRecorder:
    """Records requests in their sessions as they end. Owner: the inference thread.

    Invariant: the scheduler calls `ended` once for each request that has a visit.
    """

    def __init__(
        self,
        sessions: SessionManager,
        evictions: Callable[[], int] | None,
        render_next: Callable[[RenderNextPrompt], None],
    ) -> None:
        """`evictions` says how often kept KV made way; None where none is kept at all.

        `render_next` never blocks.
        """
        self._sessions = sessions
        self._evictions = evictions
        self._render_next = render_next

    def ended(self, request: Request, usage: Usage, reason: str, stop: str | None) -> Usage:
        """Record the request; return its usage with whose it is and what it lost."""
        visit = request.visit
        if visit is None:
            return usage
        assert request.slot is None, request.request_id
        # Nobody goes on from what the watchdog has ended, as from what a client has left.
        is_broken_off = reason == "cancelled" or request.is_expired
        parts = request.output.parts
        calls = tuple((call.name, call.arguments) for call in parts.calls)
        ending = RequestEnding(
            request_id=request.request_id,
            text=request.output.text,
            said=TurnContent(parts.reasoning, parts.content, calls),
            call_ids=tuple(request.call_ids),
            signature=request.signature,
            sampled=request.sampled,
            usage=usage,
            limit=request.query.limit if self._evictions is not None else 0,
            is_whole=stop is None and not is_broken_off and not request.output.is_cut,
            is_cancelled=is_broken_off,
            raised=raised_counters(request),
            evictions=self._evictions() if self._evictions is not None else 0,
        )
        divergence = self._sessions.ended(visit, ending)
        if self._evictions is not None and not ending.is_cancelled:
            self._render_next(RenderNextPrompt(request))
        return dataclasses.replace(usage, divergence=divergence, session_kind=visit.kind)
