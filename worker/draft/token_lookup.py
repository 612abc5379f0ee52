"""Follows, for one answer, a text in which its last tokens stood before."""

from collections.abc import Callable, Sequence
from typing import Final

from hearth.worker.draft.draft import DraftSource
from hearth.worker.draft.token_history import Fits, TokenHistory

FEW_LENGTH: Final = 2  # that a match counts more where few tokens may come
START_LENGTH: Final = 16  # what the begin of a prediction counts as: nothing was compared yet


class TokenLookup:
    """The place of one text that is followed, or none.

    Where the answer goes on as the text did, the best match is the last one's, a token longer: it
    is looked up again only where the two part. Owner: the inference thread.
    """

    def __init__(
        self,
        source: DraftSource,
        text: Callable[[], TokenHistory | None],
        is_own: bool = False,
        from_start: bool = False,
    ) -> None:
        """`is_own` is of the answer's own conversation, whose end is the answer's."""
        self.source = source
        self.length = START_LENGTH if from_start else 0  # of the match; 0: there is none
        self._text = text
        self._is_own = is_own
        self._followed = text() if from_start else None
        self._end = 0  # of the match in `_followed`
        self._is_current = from_start
        self._left = 0  # where a match ended last; 0: none did

    def take(self, token: int) -> None:
        """Take the answer's next token, before the own conversation has it."""
        text, end = self._followed, self._end
        goes_on = text is not None and text.token_at(end) == token
        if text is not None and goes_on and (self._is_own or text.token_at(end + 1) is not None):
            self._end, self.length = end + 1, self.length + 1
        else:
            if text is not None:
                self._left = end
            self._followed, self.length, self._is_current = None, 0, False

    def look_up(self, tail: list[int]) -> None:
        """Find the best place for the answer's last tokens, unless it is known."""
        if not self._is_current:
            self._is_current = True
            self._followed, self._end, self.length = self._found(tail)
            if not self.length and tail:
                self._look_near(tail[-1])

    def _look_near(self, token: int) -> None:
        """Go on near the place that was followed last, where the last token stands there too.

        Text that was copied with a change goes on like that behind it.
        """
        text = self._text()
        near = text.find_near(self._left, token) if text is not None and self._left else 0
        if near:
            self._followed, self._end, self.length = text, near, 1

    def next_tokens(self, count: int) -> list[int]:
        """Return what followed at the place."""
        return self._next_tokens(self._followed, self._end, (), count)

    def behind(self, ahead: Sequence[int], tail: list[int], count: int) -> tuple[list[int], int]:
        """Return what may follow when `ahead` has come behind `tail`, and the match's length."""
        known = self.next_tokens(len(ahead) + count)
        if len(known) > len(ahead) and known[: len(ahead)] == list(ahead):
            return known[len(ahead) :], self.length + len(ahead)
        text, end, length = self._found([*tail, *ahead])
        return self._next_tokens(text, end, ahead, count), length

    def other_tokens(self, than: int, tail: list[int], count: int) -> tuple[list[int], int]:
        """Return what follows at the best place where that is not `than`, and its length."""
        text = self._text()
        match = text.find(tail, unlike=than) if text is not None else None
        if text is None or match is None:
            return [], 0
        return text.followed(match.end, count), match.length

    def fitting_token(self, tail: list[int], fits: Fits) -> tuple[list[int], int]:
        """Return the token that came last of the few that may come, and the match's length."""
        text = self._text()
        match = text.find_fitting(tail, fits) if text is not None and tail else None
        if text is None or match is None:
            return [], 0
        return text.followed(match.end, 1), match.length + FEW_LENGTH

    def _found(self, tail: list[int]) -> tuple[TokenHistory | None, int, int]:
        text = self._text()
        if text is None:
            return None, 0, 0
        match = text.find(tail)
        return (text, match.end, match.length) if match is not None else (None, 0, 0)

    def _next_tokens(
        self, text: TokenHistory | None, end: int, ahead: Sequence[int], count: int
    ) -> list[int]:
        """Return what follows in a text; the own one is thought to repeat itself at its end."""
        if text is None:
            return []
        found = text.followed(end, count)
        if self._is_own and end + len(found) == len(text):
            found += ahead
            period = len(found)
            while period and len(found) < count:
                found.append(found[-period])
        return found[:count]
