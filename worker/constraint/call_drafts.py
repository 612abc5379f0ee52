"""Tells which tokens a call must go on with, in an answer that no grammar is enforced on.

Touches no MLX.
"""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Final

from hearth.worker.constraint.call_text.text_shape import (
    Literal,
    Order,
    Places,
    Shape,
    TooWide,
    begin,
    behind,
    forced,
)

log = logging.getLogger(__name__)

TAIL_BYTES: Final = 64  # of the answer that are looked at for a mark; all are shorter
CALL_BYTES_MAX: Final = 1 << 16  # that may be read again in another order, in milliseconds
CALL_STEPS_MAX: Final = 4_096  # in which it is read again
FORCED_BYTES_MAX: Final = 128  # that are told at once
CHARACTER_BYTES_MAX: Final = 4
TEXTS_MAX: Final = 512  # whose tokens are remembered


class ForcedTexts:
    """Puts text that must come into tokens, and remembers them for one owner.

    Owner: the inference thread.
    """

    def __init__(
        self,
        tokens_of: Callable[[str], Sequence[int]],
        token_bytes: Callable[[int], bytes],
        marks: Container[int],
    ) -> None:
        """`marks` are tokens that no other text is made of."""
        self._tokens_of = tokens_of
        self.token_bytes = token_bytes
        self._marks = marks
        self._tokens: dict[bytes, list[int]] = {}  # by text

    def tokens_behind(self, places: Places) -> list[int]:
        """Return the tokens that must come: but for the last one where a longer one may.

        Raises TooWide.
        """
        text, places = forced(places, FORCED_BYTES_MAX)
        if not text:
            return []
        tokens = self._tokens.get(text)
        if tokens is None:
            tokens = self._spelt(text)
        is_sure = None in places or (tokens and tokens[-1] in self._marks)
        return tokens if is_sure else tokens[:-1]

    def _spelt(self, text: bytes) -> list[int]:
        """Return a text's tokens, and remember those of each part of it that is asked for next."""
        if len(self._tokens) >= TEXTS_MAX:
            self._tokens.clear()
        tokens = list(self._tokens_of(text.decode(errors="ignore")))  # it may end amid a character
        pieces = [self.token_bytes(token) for token in tokens]
        spelt = b"".join(pieces)
        if not text.startswith(spelt) or len(text) - len(spelt) >= CHARACTER_BYTES_MAX:
            tokens = []
        self._tokens[text] = tokens
        rest = text
        for count, piece in enumerate(pieces if tokens else (), 1):
            rest = rest[len(piece) :]
            self._tokens[rest] = tokens[count:]
        return tokens


class CallDrafts:
    """Follows the calls of one answer in their shape, from the mark that opens each.

    Invariant: it never raises, and never waits. A call that leaves its shape has no more forced
    tokens; one whose members come in another order than the schema's is followed in any order.
    Owner: the inference thread.
    """

    def __init__(
        self, mark: str, shape: Shape, order: Order, texts: ForcedTexts, counts: Counter[str]
    ) -> None:
        """Calls begin with `mark`, and have the `shape` from it on, whose `order` is the answer's.

        `texts` are of the answer's owner; `counts` is added to.
        """
        assert 0 < len(mark.encode()) < TAIL_BYTES, mark
        self._mark = mark.encode()
        self._shape = shape
        self._order = order
        self._token_bytes = texts.token_bytes
        self._texts = texts
        self._counts = counts
        self._tail = b""  # the bytes that were written last, outside a call that is followed
        self._written = bytearray()  # of the call
        self._places: Places = ()  # of the call that is followed, if any
        self._behind_end: bytes | None = None  # where the call may have ended: what came since
        self._is_over = False

    @property
    def is_following(self) -> bool:
        """Whether a call is open, as far as is known."""
        return bool(self._places)

    def take(self, tokens: Sequence[int]) -> None:
        """Take the answer's next tokens."""
        for token in tokens:
            if not self._is_over:
                self._take(self._token_bytes(token))

    def forced(self, tokens_max: int) -> list[int]:
        """Return tokens that very likely come next; none where that is not known."""
        assert tokens_max >= 0, tokens_max
        try:
            return self._texts.tokens_behind(self._places)[:tokens_max]
        except TooWide:
            return []

    def fitting(self, ahead: Sequence[int], tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Return how many of `tokens` may come behind `ahead`, and what must come behind them.

        Those are counted up to the first one behind which something must come, and within calls:
        an answer mostly ends behind one, and its end is never worth a draft.
        """
        if not self._places:
            return len(tokens), []
        try:
            places = self._places_behind(ahead)
            for count, token in enumerate(tokens):
                places, _ = behind(places, self._token_bytes(token))
                if not places:
                    return count, []
                if found := self._texts.tokens_behind(places):
                    return count + 1, found
        except TooWide:
            pass
        return len(tokens), []

    def choice(self, ahead: Sequence[int]) -> Callable[[int], bool] | None:
        """Return what says whether a token may come behind `ahead`, where one of few texts must.

        It is None elsewhere.
        """
        try:
            places = self._places_behind(ahead)
        except TooWide:
            return None
        texts = sorted(
            place.shape.text[place.state :]
            for place in places
            if place and isinstance(place.shape, Literal)
        )
        if not texts or len(texts) < len(places):
            return None
        whole = tuple(texts)

        def may_come(token: int) -> bool:
            text = self._token_bytes(token)
            after = bisect_left(texts, text)  # of all texts, those that begin with it
            if after < len(texts) and texts[after].startswith(text):
                return True
            return text.startswith(whole) and _is_in(places, text)

        return may_come

    def _places_behind(self, ahead: Sequence[int]) -> Places:
        text = b"".join(map(self._token_bytes, ahead))
        return behind(self._places, text)[0] if text else self._places

    def _take(self, text: bytes) -> None:
        """Read what came; what stands behind a call may open the next one."""
        try:
            rest: bytes | None = text
            while rest and not self._is_over:
                rest = self._read(rest) if self._places else self._look_for_a_mark(rest)
        except TooWide:
            self._clear()
        except Exception:
            log.exception("drafting a call broke")
            self._counts["call_drafts_ended"] += 1
            self._is_over = True
            self._clear()

    def _look_for_a_mark(self, text: bytes) -> bytes | None:
        """Return the text from a mark on, which opens a call; None where there is none."""
        before, mark, since = (self._tail + text).partition(self._mark)
        if not mark:
            self._tail = before[-TAIL_BYTES:]
            return None
        self._tail = b""
        self._places = begin(self._shape)
        return mark + since

    # ------------------------------------------------------------ a call

    def _read(self, text: bytes) -> bytes | None:
        """Read on in a call; return what may open another one, None where this one goes on."""
        places, left = behind(self._places, text)
        if not places and not left and self._behind_end is None and self._order.is_kept:
            places, left = self._in_any_order(text)
        if places:
            self._places = places
            self._written += text
            self._note_end(text)
            return None
        since = text if self._written else None  # behind a call that leaves its shape
        if left or self._behind_end is not None:
            since = text[len(text) - left :] if left else (self._behind_end or b"") + text
        self._clear()
        return since

    def _in_any_order(self, text: bytes) -> tuple[Places, int]:
        """Read the call again, which is in no order: the answer's next ones are read so at once."""
        self._order.is_kept = False
        places: Places = ()
        try:
            written = bytes(self._written) + text
            places, left = behind(begin(self._shape), written, CALL_STEPS_MAX)
        finally:
            self._order.is_kept = not places
        return places, left

    def _note_end(self, text: bytes) -> None:
        """Take notice of where the call may have ended."""
        if self._places == (None,):
            self._clear()
        elif None in self._places:
            self._behind_end = b""
        elif self._behind_end is not None:
            is_near = len(self._behind_end) + len(text) < TAIL_BYTES
            self._behind_end = self._behind_end + text if is_near else None
        if len(self._written) > CALL_BYTES_MAX:
            self._clear()

    def _clear(self) -> None:
        """Follow this call no more; another may begin."""
        self._places, self._behind_end = (), None
        self._written.clear()


def _is_in(places: Places, text: bytes) -> bool:
    """Return whether a text may come in one of some places."""
    try:
        return bool(behind(places, text)[0])
    except TooWide:
        return True
