"""Has a prompt that a worker died with run alone, in small forwards, until it is cleared.

Served so, it may still be one that whole forwards end a worker with. So it is read once more alone
and in whole forwards, where it is to be read again: that clears it, or shows that it needs small
ones.
"""

import dataclasses
import logging
from collections.abc import Callable, Collection
from typing import Final

from hearth.shared.suspects.suspect_store import SuspectStore, Suspicion
from hearth.shared.suspending_clock import awake_s
from hearth.worker.cache.image_keys import is_inside
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.schedule.request_state import Request
from hearth.worker.schedule.suspects.running_forwards import idle_name

log = logging.getLogger(__name__)

PASSED_S: Final = 10.0  # that others may begin before a suspect; then nobody does until it has
BEHIND_TOKENS: Final = 64  # an answer is left alone until it is so far behind where it broke off
CHUNK_SHARE: Final = 4  # a suspect is read in a quarter of the chunk


class SuspectIsolation:
    """Decides who runs beside whom, by who is suspected. Owner: the inference thread.

    Invariant: while a suspect has not passed the place where a worker died with its tokens, no
    other request has a slot. A suspect whose tokens up to there are kept has passed it.
    """

    def __init__(
        self,
        store: SuspectStore | None = None,
        chunk: int = 1 << 40,
        clock: Callable[[], float] = awake_s,
    ) -> None:
        """`chunk` is how many tokens a forward reads of who is not suspected."""
        self._store = store
        self._chunk = max(1, chunk // CHUNK_SHARE)
        self._clock = clock
        self._cleared: set[Suspicion] = set()  # by this process, also for requests rendered before

    def gate(
        self, running: Collection[Request], waiting: Collection[Request]
    ) -> Callable[[Request], bool]:
        """Return what says of a waiting request whether it may have a slot now."""
        if any(map(self._runs_alone, running)):
            return lambda _: False
        suspects = [request for request in waiting if self._has_to_be_alone(request)]
        if not suspects:
            return lambda _: True
        ids = {request.request_id for request in suspects}
        now = self._clock()
        is_their_turn = any(now - each.lease.received_at > PASSED_S for each in suspects)

        def may_begin(request: Request) -> bool:
            return not running if request.request_id in ids else not is_their_turn

        return may_begin

    def begin(self, request: Request) -> None:
        """Note, as `request` is given its slot, whether it is read in small forwards."""
        request.is_read_apart = any(
            each.stage != "trial" for each in self._to_read(request, request.cached_tokens)
        )

    def forward_end(self, request: Request, end: int) -> int:
        """Return where a forward ends that would end at `end`, were it nobody's suspect."""
        if not request.is_read_apart:
            return end
        near = (request.position // self._chunk + 1) * self._chunk
        return end if near >= end or is_inside(request.query.tokens, near) else near

    def served(self, request: Request) -> None:
        """Take note that `request` was answered, or read where that was all."""
        was_read = self._to_read(request, request.cached_tokens)
        for suspicion in self._live(request):
            assert self._store is not None, "who is suspected is in the store"
            if suspicion.kind == "decode":
                is_cleared = not request.is_prefill_only
            else:
                is_cleared = suspicion in was_read and suspicion.stage == "trial"
                if suspicion in was_read and suspicion.stage == "suspect":
                    self._put_on_trial(suspicion)
            if is_cleared:
                self._cleared.add(suspicion)
                self._store.drop(suspicion)

    def _put_on_trial(self, suspicion: Suspicion) -> None:
        assert self._store is not None, "who is suspected is in the store"
        try:
            self._store.save(dataclasses.replace(suspicion, stage="trial"))
        except OSError:  # it stays a suspect: read in small forwards once more
            log.warning("that a suspect was served cannot be kept")

    def spoils(self, query: PrefixQuery) -> bool:
        """Whether a worker died with these tokens in idle time: they are not read there again."""
        if self._store is None:
            return False
        known = self._store.all()
        if all(row.kind != "idle" for row in known.values()):
            return False
        return any(idle_name(self._store, name).hex() in known for name in query.names)

    def _live(self, request: Request) -> list[Suspicion]:
        return [each for each in request.suspicions if each not in self._cleared]

    def _has_to_be_alone(self, request: Request) -> bool:
        """Whether a waiting request is a suspect by what it will read or answer."""
        if any(each.kind == "decode" for each in self._live(request)):
            return True
        return any(each.stage != "small" for each in self._to_read(request, request.kept_tokens))

    def _to_read(self, request: Request, kept_tokens: int) -> list[Suspicion]:
        """Return what it is suspected of reading, where so many of its tokens are kept."""
        return [
            each
            for each in self._live(request)
            if each.kind != "decode" and each.length > kept_tokens
        ]

    def _runs_alone(self, request: Request) -> bool:
        if request.first_token_at is None and any(
            each.stage != "small" for each in self._to_read(request, request.cached_tokens)
        ):
            return True
        done = request.prompt_tokens + request.completion_tokens
        return any(
            each.kind == "decode" and done <= each.tokens + BEHIND_TOKENS
            for each in self._live(request)
        )
