"""Decides after a worker's death whose forward is suspected of it, and who is refused for it.

A first death refuses nobody: what killed the worker may have been its operator. The requests in its
forward are suspects, which are retried alone, in small forwards first and then in whole ones, and
clear themselves so. A suspect that dies alone at the same place is refused; dying elsewhere, or not
alone, it stays a suspect, until it has died alone twice. One that dies in whole forwards only is
read in small ones from then on.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hearth.shared.errors import RequestError, WorkerLost
from hearth.shared.suspects.forward_record import ForwardRow
from hearth.shared.suspects.suspect_store import SuspectStore, Suspicion

NEAR_TOKENS: Final = 32  # two answers broke off at one place if they did no further apart
LONE_DEATHS_MAX: Final = 2

log = logging.getLogger(__name__)


class DeathSuspects:
    """Turns what a worker left behind into suspicions. Owner: the event loop."""

    def __init__(
        self, store: SuspectStore | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Without a store nobody is suspected."""
        self._store = store
        self._clock = clock

    def note(
        self, rows: Sequence[ForwardRow], how: str, *, is_proof: bool = True
    ) -> dict[str, Suspicion]:
        """Suspect the requests in `rows`; return what is known of each now, by its id.

        `is_proof`: the worker ended by what ran in it. Else the death counts as in company.
        """
        if self._store is None:
            return {}
        known = self._store.all()
        found: dict[str, Suspicion] = {}
        for row in rows:
            now = self._after(row, known, how, is_lone=row.is_alone and is_proof)
            found[row.request_id] = now
            log.warning(
                "suspect request=%s amid=%s tokens=%d deaths=%d alone=%d refused=%d: %s",
                row.request_id or "none",
                row.kind,
                row.tokens,
                now.deaths,
                now.lone_deaths,
                now.is_refused,
                how,
            )
            try:
                self._store.save(now)
            except OSError as error:
                log.error("the suspicion cannot be kept, it may end the next worker: %s", error)
        return found

    def _after(
        self, row: ForwardRow, known: Mapping[str, Suspicion], how: str, *, is_lone: bool
    ) -> Suspicion:
        """Return the suspicion of `row` after this death."""
        before = [
            each for each in (known.get(_hex(row.name)), known.get(_hex(row.suspect))) if each
        ]
        deaths = 1 + max((each.deaths for each in before), default=0)
        lone_deaths = is_lone + max((each.lone_deaths for each in before), default=0)
        is_again = is_lone and any(_is_same_place(each, row) for each in before)
        # Served in small forwards and dead in whole ones: small ones are what it needs.
        is_trial = row.kind != "decode" and is_lone and any(e.stage == "trial" for e in before)
        is_refused = (
            row.kind != "idle" and not is_trial and (is_again or lone_deaths >= LONE_DEATHS_MAX)
        )
        name, length, kind = _hex(row.name), row.length, row.kind
        for each in before:
            if is_refused and each.length > length:  # never more prompts than it died with before
                name, length, kind = each.name, each.length, each.kind
        return Suspicion(
            name=name,
            owner=_hex(row.owner),
            kind=kind,
            length=length,
            tokens=max(row.tokens, length),
            deaths=deaths,
            lone_deaths=lone_deaths,
            died_at=self._clock(),
            how=how,
            is_refused=is_refused,
            stage="small" if is_trial else "suspect",
        )


def error_of(suspicion: Suspicion, text: str) -> RequestError:
    """Return what the client of a request is told that has died; `text` tells of the death."""
    if suspicion.is_refused:
        return suspicion.refusal()
    return WorkerLost(
        f"{text} Its own forward ran then: it is retried alone, and refused if it ends that worker "
        "too."
    )


def _is_same_place(suspicion: Suspicion, row: ForwardRow) -> bool:
    if suspicion.name != _hex(row.name):
        return False
    return row.kind != "decode" or abs(suspicion.tokens - row.tokens) <= NEAR_TOKENS


def _hex(name: bytes) -> str:
    return name.hex()
