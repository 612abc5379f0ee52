"""Finds where the last tokens of a text stood before, and follows it there for an answer.

N-grams of two lengths are hashed into tables of the places where they ended last, and each place
knows the one before it: 22 bytes a token. Long texts are taken in at once, by numpy.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hearth.worker.draft.draft import DraftSource

Places = npt.NDArray[np.int32]
Fits = Callable[[int], bool]  # says of a token whether it may come

# Lengths of the n-grams that are looked up, the longer first: it finds the place of a long match
# even where the shorter n-gram stood in many places since.
ORDERS: Final = (6, 2)
PLACES_MAX: Final = 8  # that are looked at for each order, the newest first
MATCH_MAX: Final = 64  # tokens of a match that are counted
NEWEST: Final = 1 << 15  # tokens that are looked through for one of few that may come
FITTING_MAX: Final = 64  # places that are asked for one
# Where text that left a place is looked for again: what it changed is seldom longer.
NEAR_BEFORE: Final = 4
NEAR_BEHIND: Final = 24
SEPARATOR: Final = -1  # stands between texts; no token is alike, and nothing follows one
FEW_LENGTH: Final = 2  # that a match counts more where few tokens may come
START_LENGTH: Final = 16  # what the begin of a prediction counts as: nothing was compared yet
_ROOM_MIN: Final = 512  # tokens
_RUN: Final = 8  # tokens that are compared at once
_SLOTS_PER_TOKEN: Final = 1.25
_FACTOR: Final = 0x9E3779B97F4A7C15  # of Knuth's multiplicative hashing
_BITS: Final = (1 << 64) - 1


class Match(NamedTuple):
    """Says that the last `length` tokens of some text stood in a history up to `end`."""

    length: int
    end: int


class TokenHistory:
    """Tokens in order, and where each n-gram of them ended last.

    Invariants: `_before[order][end]` is a smaller end whose n-gram has the same slot, 0 where there
    is none; what is returned was compared token by token, so that a shared slot costs time alone.
    Owner: the inference thread.
    """

    def __init__(self, tokens: Sequence[int] | Places = (), room: int = 0) -> None:
        """`room` is how many tokens it is made for; it grows beyond."""
        self._count = 0
        self._tokens = np.zeros(0, np.int32)
        self._grow(np.asarray(tokens, np.int32), room)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        tables = sum(table.nbytes for table in (*self._last.values(), *self._before.values()))
        return self._tokens.nbytes + tables

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the next tokens, each in some microseconds."""
        if self._count + len(tokens) > len(self._tokens):
            fresh = np.asarray(tokens, np.int32)
            known = np.concatenate((self._tokens[: self._count], fresh))
            self._grow(known, len(known) + len(known) // 8 + _ROOM_MIN)
            return
        for token in tokens:
            self._read[self._count] = token
            self._count = end = self._count + 1
            for order in ORDERS:
                if end >= order:
                    slot, last = self._slot(self._read[end - order : end]), self._read_last[order]
                    self._read_before[order][end] = last[slot]
                    last[slot] = end

    def find(self, tail: list[int], unlike: int = SEPARATOR) -> Match | None:
        """Return the longest match of the end of `tail`, of the longest the newest; or None.

        Only places that a token follows count, another than `unlike`: no text's end is one.
        `tail` holds tokens alone, no separator.
        """
        found = (self._find(order, tail, unlike) for order in ORDERS if len(tail) >= order)
        return next((match for match in found if match is not None), None)

    def find_fitting(self, tail: list[int], fits: Fits) -> Match | None:
        """Return the newest place whose next token `fits`, behind the last two tokens or the last.

        It looks at the newest tokens alone, and asks of the newest FITTING_MAX places of each.
        """
        tokens = self._tokens[max(0, self._count - NEWEST) : self._count]
        is_last = tokens[:-1] == tail[-1]
        for length in range(min(2, len(tail)), 0, -1):
            if length == 2:
                places = np.flatnonzero(is_last[1:] & (tokens[:-2] == tail[-2])) + 2
            else:
                places = np.flatnonzero(is_last) + 1
            for place in places[: -FITTING_MAX - 1 : -1].tolist():
                end = self._count - len(tokens) + place
                token = self.token_at(end)
                if token is not None and fits(token):
                    return Match(length, end)
        return None

    def find_near(self, end: int, token: int) -> int:
        """Return the place behind the `token` that stands nearest to a place; 0 where none does."""
        start = max(0, end - NEAR_BEFORE)
        around = self._read[start : min(end + NEAR_BEHIND, self._count)].tolist()
        if token not in around:
            return 0
        places = [start + at + 1 for at, each in enumerate(around) if each == token]
        places = [place for place in places if self.token_at(place) is not None]
        return min(places, key=lambda place: abs(place - end), default=0)

    def followed(self, end: int, count: int) -> list[int]:
        """Return the tokens that followed the place `end`, at most `count`."""
        found = self._tokens[end : min(end + count, self._count)].tolist()
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found

    def tail(self) -> list[int]:
        """Return the last tokens, as many as a match may have."""
        return self._read[max(0, self._count - MATCH_MAX) : self._count].tolist()

    def newest(self, count: int) -> Places:
        """Return the last tokens, at most `count`; not to be written to."""
        return self._tokens[max(0, self._count - count) : self._count]

    def token_at(self, end: int) -> int | None:
        """Return the token that followed the place `end`; None where a text ended, or this."""
        token = self._read[end] if end < self._count else SEPARATOR
        return token if token != SEPARATOR else None

    # ------------------------------------------------------------ lookup

    def _find(self, order: int, tail: list[int], unlike: int) -> Match | None:
        """Return the longest match of at least `order` tokens, of those that ended last."""
        read, earlier, last = self._read, self._read_before[order], len(tail) - 1
        end = self._read_last[order][self._slot(tail[-order:])]
        longest, found = order - 1, 0
        for _ in range(PLACES_MAX):
            if not end:
                break
            # A longer match has this token too: most places are told by it alone.
            if end > longest <= last and read[end - 1 - longest] == tail[last - longest]:
                length = self._match_length(end, tail)
                if length > longest and self.token_at(end) not in (None, unlike):
                    longest, found = length, end
            end = earlier[end]
        return Match(longest, found) if found else None

    def _match_length(self, end: int, tail: list[int]) -> int:
        read, length, size = self._read, 0, len(tail)
        longest = min(size, end, MATCH_MAX)
        while length + _RUN <= longest:  # many at once, where the match is long
            place = end - length
            if read[place - _RUN : place].tolist() != tail[size - length - _RUN : size - length]:
                break
            length += _RUN
        while length < longest and read[end - 1 - length] == tail[size - 1 - length]:
            length += 1
        return length

    # ------------------------------------------------------------ what is written

    def _grow(self, tokens: Places, room: int) -> None:
        """Begin anew with `tokens` and room for more."""
        room = max(room, len(tokens), _ROOM_MIN)
        self._slots = int(room * _SLOTS_PER_TOKEN)
        self._tokens = np.zeros(room, np.int32)
        self._tokens[: len(tokens)] = tokens
        self._count = len(tokens)
        self._last = {order: np.zeros(self._slots, np.int32) for order in ORDERS}
        self._before = {order: np.zeros(room + 1, np.int32) for order in ORDERS}
        for order in ORDERS:
            self._index(order)
        # Items of a memoryview are read in a third of the time of numpy's.
        self._read = self._tokens.data
        self._read_last = {order: table.data for order, table in self._last.items()}
        self._read_before = {order: table.data for order, table in self._before.items()}

    def _index(self, order: int) -> None:
        """Write the tables of one order for all tokens."""
        if self._count < order:
            return
        # The slot of each n-gram, as `_slot` gives it.
        tokens = self._tokens[: self._count].astype(np.uint64)
        grams = self._count - order + 1
        hashes = np.zeros(grams, np.uint64)
        for place in range(order):
            hashes += tokens[place : place + grams]
            hashes *= np.uint64(_FACTOR)
        slots = ((hashes >> np.uint64(32)) * np.uint64(self._slots)) >> np.uint64(32)
        # Slot and place in one number: sorted, equal slots stand side by side with their places in
        # order, and a sort of values is several times faster than one of places by slots.
        ends = np.arange(order, self._count + 1, dtype=np.uint64)
        both = (slots << np.uint64(32)) | ends
        both.sort()
        places = (both & np.uint64(0xFFFFFFFF)).astype(np.int32)
        ordered = both >> np.uint64(32)
        is_same = ordered[1:] == ordered[:-1]
        self._before[order][places[1:][is_same]] = places[:-1][is_same]
        is_last = np.append(~is_same, True)
        self._last[order][ordered[is_last]] = places[is_last]

    def _slot(self, gram: Sequence[int]) -> int:
        hashed = 0
        for token in gram:
            hashed = (hashed + token) * _FACTOR & _BITS
        return (hashed >> 32) * self._slots >> 32


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
            text = self._text()
            if not self.length and tail and text is not None and self._left:
                # Where the last token stands near the place that was followed last it goes on
                # there: text that was copied with a change goes on like that behind it.
                near = text.find_near(self._left, tail[-1])
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
        text, end, length = self._found(tail, than)
        return (text.followed(end, count), length) if text is not None else ([], 0)

    def fitting_token(self, tail: list[int], fits: Fits) -> tuple[list[int], int]:
        """Return the token that came last of the few that may come, and the match's length."""
        text = self._text()
        match = text.find_fitting(tail, fits) if text is not None and tail else None
        if text is None or match is None:
            return [], 0
        return text.followed(match.end, 1), match.length + FEW_LENGTH

    def _found(
        self, tail: list[int], unlike: int = SEPARATOR
    ) -> tuple[TokenHistory | None, int, int]:
        """Return the text, the best place in it and the match's length; None, 0, 0 without one."""
        text = self._text()
        match = text.find(tail, unlike) if text is not None else None
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
