"""Tells the sessions how a request ended."""

import dataclasses
from collections.abc import Callable

from shared.wire import Usage
from worker.request import Foresee, Request
from worker.sessions.echo import Said
from worker.sessions.sessions import Ending, Sessions
from worker.stream.parts import Parts


class Recorder:
    """What the scheduler calls at each request's end. Owner: the inference thread."""

    def __init__(
        self, sessions: Sessions, reuses: bool, foresee: Callable[[Foresee], None]
    ) -> None:
        """`reuses` says whether this model's KV is kept at all; `foresee` never waits."""
        self._sessions = sessions
        self._reuses = reuses
        self._foresee = foresee

    def ended(self, request: Request, usage: Usage, reason: str, stop: str | None) -> Usage:
        """Record the request; return its usage with whose it is and what it lost."""
        visit = request.visit
        if visit is None:
            return usage
        # Nobody goes on from what the watchdog has ended, as from what a client has left.
        is_broken_off = reason == "cancelled" or request.is_expired
        ending = Ending(
            request_id=request.request_id,
            text=request.output.text,
            said=_said(request.output.parts),
            call_ids=tuple(request.call_ids),
            signature=request.signature,
            sampled=request.sampled,
            usage=usage,
            limit=request.query.limit if self._reuses else 0,
            is_whole=stop is None and not is_broken_off and not request.output.is_cut,
            is_cancelled=is_broken_off,
        )
        divergence = self._sessions.ended(visit, ending)
        if self._reuses and not ending.is_cancelled:
            self._foresee(Foresee(request))
        return dataclasses.replace(usage, divergence=divergence, session_kind=visit.kind)


def _said(parts: Parts) -> Said:
    calls = tuple((call.name, call.arguments) for call in parts.calls)
    return Said(parts.reasoning, parts.content, calls)
