"""Tells which tokens a call must go on with, in an answer that no grammar is enforced on.

Touches no MLX.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

from hearth.worker.constraint.grammar_client import (
    TOLD_TOKENS_MAX,
    GrammarEnded,
    GrammarError,
    GrammarLost,
    GrammarProcess,
    GrammarStill,
)
from hearth.worker.constraint.grammar_protocol import ENDED, SOUND

log = logging.getLogger(__name__)

WAIT_S_MAX: Final = 0.02  # the inference thread waits, for nothing but a draft
TAIL_BYTES: Final = 64  # of the answer that are looked at for a mark; all are shorter
UNTOLD_TOKENS_MAX: Final = 1024  # of a call that its grammar has not come to yet
VAIN_MAX: Final = 4  # calls that leave their grammar before any token of it was forced
# Why an answer has no more forced tokens, as counted.
ENDS: Final = ("slow", "unavailable", "ended", "lost", "broken")

# Begins to start a process that stands in front of a call; it gives None where none can be had.
Start = Callable[[], Future[GrammarProcess | None]]


class CallDrafts:
    """Follows the calls of one answer in their grammar, from the mark that opens each.

    Invariant: it never raises, and waits WAIT_S_MAX at most in each method. A call that leaves the
    grammar has no more forced tokens; a process that is lost or slow leaves the rest of the answer
    without any.
    Owner: the inference thread.
    """

    def __init__(
        self,
        mark: str,
        start: Start,
        token_bytes: Callable[[int], bytes],
        tokens_of: Callable[[str], Sequence[int]],
        counts: Counter[str],
    ) -> None:
        """`start` is called on the inference thread and must not block; `counts` is added to."""
        assert 0 < len(mark.encode()) < TAIL_BYTES, mark
        self._mark = mark.encode()
        self._start = start
        self._token_bytes = token_bytes
        self._tokens_of = tokens_of
        self._counts = counts
        self._tail = b""  # the bytes that were written last, outside a call that is followed
        self._starting: Future[GrammarProcess | None] | None = None  # None = no call is followed
        self._opening: list[int] = []  # the call's mark, until the process is told
        self._untold: list[int] = []  # what came behind it
        self._forced: list[int] = []  # behind all tokens, or behind those that are told
        self._vain_count = 0
        self._is_over = False

    @property
    def is_following(self) -> bool:
        """Whether a call is open, as far as is known."""
        return self._starting is not None

    @property
    def is_starting(self) -> bool:
        """Whether a call is open whose process cannot be asked yet."""
        return self._starting is not None and not self._starting.done()

    def take(self, tokens: Sequence[int]) -> None:
        """Take the answer's next tokens."""
        for token in tokens:
            self._take(token)
        if len(self._untold) >= TOLD_TOKENS_MAX:
            self._ask()

    def forced(self, tokens_max: int) -> list[int]:
        """Return tokens that very likely come next; none where that is not known in time."""
        assert tokens_max >= 0, tokens_max
        if self._starting is None:
            return []
        if not self._forced and (self._opening or self._untold):
            self._ask()
        return self._forced[:tokens_max]

    def _take(self, token: int) -> None:
        if self._is_over:
            return
        if self._starting is None:
            self._look_for_a_mark(token)
            return
        self._untold.append(token)
        is_as_forced = self._forced[:1] == [token]
        self._forced = self._forced[1:] if is_as_forced else []

    def _look_for_a_mark(self, token: int) -> None:
        self._tail = (self._tail + self._token_bytes(token))[-TAIL_BYTES:]
        _, mark, behind = self._tail.rpartition(self._mark)
        if not mark:
            return
        self._tail = b""
        written = mark + behind
        opening = list(self._tokens_of(written.decode(errors="replace")))
        if b"".join(map(self._token_bytes, opening)) == written:
            self._opening, self._starting = opening, self._start()

    # ------------------------------------------------------------ asking

    def _ask(self) -> None:
        """Tell the process what came, and learn what is forced behind that."""
        if self._starting is None or not self._starting.done():
            if len(self._untold) > UNTOLD_TOKENS_MAX:
                self._end("slow")
            return
        process = self._starting.result()
        if process is None:
            self._end("unavailable")
            return
        told = [*self._opening, *self._untold[:TOLD_TOKENS_MAX]]
        try:
            forced, state = process.forced(told, WAIT_S_MAX)
        except GrammarError:
            self._leave()
        except GrammarEnded:
            self._end("ended")
        except GrammarStill:
            self._end("slow")
        except GrammarLost:
            self._end("lost")
        except Exception:
            log.exception("drafting a call broke")
            self._end("broken")
        else:
            self._opening, self._untold = [], self._untold[TOLD_TOKENS_MAX:]
            self._forced = [] if self._untold else forced
            self._vain_count = 0 if forced else self._vain_count
            if state == ENDED:
                self._counts["followed"] += 1
                self._forget()
            elif state != SOUND:
                self._leave()

    def _leave(self) -> None:
        """Follow this call no more; another may have begun since."""
        self._counts["left"] += 1
        self._vain_count += 1
        if self._vain_count >= VAIN_MAX:
            self._is_over = True
        self._forget()

    def _forget(self) -> None:
        since = self._untold
        self._starting, self._opening, self._untold, self._forced = None, [], [], []
        self.take(since)

    def _end(self, why: str) -> None:
        """Have no more forced tokens in this answer."""
        assert why in ENDS, why
        self._counts[why] += 1
        log.info("calls of an answer are drafted no more: their grammar's process is %s", why)
        self._is_over = True
        self._forget()
