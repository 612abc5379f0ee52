"""Finds an earlier occurrence of a text's last tokens, and returns what followed there.

N-grams of two lengths are hashed into tables of the positions where each n-gram last ended. Each
position links to the previous one with the same hash. The tables take 22 bytes per token. Numpy
indexes a long text at once. A position is the number of tokens before it.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hearth.worker.draft.draft import DraftSource

TokenArray = npt.NDArray[np.int32]
Fits = Callable[[int], bool]  # whether a token may come next

# Lengths of the n-grams that are looked up, the longer first. The longer one finds a long match
# even if the shorter n-gram has occurred many times since.
ORDERS: Final = (6, 2)
POSITIONS_MAX: Final = 8  # positions compared for each order, the newest first
MATCH_MAX: Final = 64  # longest match that is measured, in tokens
NEWEST: Final = 1 << 15  # newest tokens, searched where only few tokens may come
FITTING_MAX: Final = 64  # positions that are tried in such a search
# After a change, the text is looked for this many tokens before and after the position where the
# match ended. A change is seldom longer.
NEAR_BEFORE: Final = 4
NEAR_BEHIND: Final = 24
SEPARATOR: Final = -1  # put between texts; no token has this id
FEW_LENGTH: Final = 2  # added to a match's length where only few tokens may come
START_LENGTH: Final = 16  # a prediction's start counts as a match of this length
_ROOM_MIN: Final = 512  # tokens
_RUN: Final = 8  # tokens that are compared at once
_SLOTS_PER_TOKEN: Final = 1.25
_FACTOR: Final = 0x9E3779B97F4A7C15  # the factor of Knuth's multiplicative hashing
_BITS: Final = (1 << 64) - 1


class Match(NamedTuple):
    """The last `length` tokens of a text, found in a history up to the position `end`."""

    length: int
    end: int


class TokenHistory:
    """Tokens in order, with an index of the positions where each n-gram ended.

    Invariants: `_before[order][end]` is the previous end with the same slot, or 0. Matches are
    compared token by token, so that n-grams with the same slot cost time only.
    Owner: the inference thread.
    """

    def __init__(self, tokens: Sequence[int] | TokenArray = (), room: int = 0) -> None:
        """`room` is the initial capacity in tokens. It grows when needed."""
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
        """Append tokens, in a few microseconds each."""
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
        """Return the longest match of the end of `tail`, the newest of equal ones; None without.

        A match is followed by a token other than `unlike`, so it is not at the end of a text.
        `tail` has no separators.
        """
        matches = (self._find(order, tail, unlike) for order in ORDERS if len(tail) >= order)
        return next((match for match in matches if match is not None), None)

    def find_fitting(self, tail: list[int], fits: Fits) -> Match | None:
        """Return the newest match of the last one or two tokens before a fitting token.

        Only the newest tokens are searched, and for each length only FITTING_MAX positions.
        """
        tokens = self._tokens[max(0, self._count - NEWEST) : self._count]
        is_last = tokens[:-1] == tail[-1]
        for length in range(min(2, len(tail)), 0, -1):
            if length == 2:
                positions = np.flatnonzero(is_last[1:] & (tokens[:-2] == tail[-2])) + 2
            else:
                positions = np.flatnonzero(is_last) + 1
            for position in positions[: -FITTING_MAX - 1 : -1].tolist():
                end = self._count - len(tokens) + position
                token = self.token_at(end)
                if token is not None and fits(token):
                    return Match(length, end)
        return None

    def find_near(self, end: int, token: int) -> int:
        """Return the position after the `token` that is nearest to `end`; 0 without one."""
        start = max(0, end - NEAR_BEFORE)
        around = self._read[start : min(end + NEAR_BEHIND, self._count)].tolist()
        if token not in around:
            return 0
        positions = [start + at + 1 for at, other in enumerate(around) if other == token]
        positions = [position for position in positions if self.token_at(position) is not None]
        return min(positions, key=lambda position: abs(position - end), default=0)

    def followed(self, end: int, count: int) -> list[int]:
        """Return the tokens from the position `end` on, at most `count`, within the same text."""
        tokens = self._tokens[end : min(end + count, self._count)].tolist()
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens

    def tail(self) -> list[int]:
        """Return the last MATCH_MAX tokens."""
        return self._read[max(0, self._count - MATCH_MAX) : self._count].tolist()

    def newest(self, count: int) -> TokenArray:
        """Return the last tokens, at most `count`. Callers must not change the array."""
        return self._tokens[max(0, self._count - count) : self._count]

    def token_at(self, end: int) -> int | None:
        """Return the token at the position `end`; None at the end of a text."""
        token = self._read[end] if end < self._count else SEPARATOR
        return token if token != SEPARATOR else None

    # ------------------------------------------------------------ lookup

    def _find(self, order: int, tail: list[int], unlike: int) -> Match | None:
        """Return the longest match of at least `order` tokens, among the newest positions."""
        read, earlier, last = self._read, self._read_before[order], len(tail) - 1
        end = self._read_last[order][self._slot(tail[-order:])]
        longest, found = order - 1, 0
        for _ in range(POSITIONS_MAX):
            if not end:
                break
            # A longer match needs this token too: this test alone rules out most positions.
            if end > longest <= last and read[end - 1 - longest] == tail[last - longest]:
                length = self._match_length(end, tail)
                if length > longest and self.token_at(end) not in (None, unlike):
                    longest, found = length, end
            end = earlier[end]
        return Match(longest, found) if found else None

    def _match_length(self, end: int, tail: list[int]) -> int:
        read, length, size = self._read, 0, len(tail)
        longest = min(size, end, MATCH_MAX)
        while length + _RUN <= longest:  # several tokens at once
            position = end - length
            if (
                read[position - _RUN : position].tolist()
                != tail[size - length - _RUN : size - length]
            ):
                break
            length += _RUN
        while length < longest and read[end - 1 - length] == tail[size - 1 - length]:
            length += 1
        return length

    # ------------------------------------------------------------ the index

    def _grow(self, tokens: TokenArray, room: int) -> None:
        """Rebuild the tables for `tokens`, with the capacity `room`."""
        room = max(room, len(tokens), _ROOM_MIN)
        self._slots = int(room * _SLOTS_PER_TOKEN)
        self._tokens = np.zeros(room, np.int32)
        self._tokens[: len(tokens)] = tokens
        self._count = len(tokens)
        self._last = {order: np.zeros(self._slots, np.int32) for order in ORDERS}
        self._before = {order: np.zeros(room + 1, np.int32) for order in ORDERS}
        for order in ORDERS:
            self._index(order)
        # Reading an item of a memoryview takes a third of the time that numpy takes.
        self._read = self._tokens.data
        self._read_last = {order: table.data for order, table in self._last.items()}
        self._read_before = {order: table.data for order, table in self._before.items()}

    def _index(self, order: int) -> None:
        """Fill the tables of one order with all tokens."""
        if self._count < order:
            return
        # The slots of all n-grams, computed as in `_slot`.
        tokens = self._tokens[: self._count].astype(np.uint64)
        grams = self._count - order + 1
        hashes = np.zeros(grams, np.uint64)
        for position in range(order):
            hashes += tokens[position : position + grams]
            hashes *= np.uint64(_FACTOR)
        slots = ((hashes >> np.uint64(32)) * np.uint64(self._slots)) >> np.uint64(32)
        # Slot and position are packed into one number. Sorting groups equal slots with ascending
        # positions, and is several times faster than sorting positions by slots.
        ends = np.arange(order, self._count + 1, dtype=np.uint64)
        both = (slots << np.uint64(32)) | ends
        both.sort()
        positions = (both & np.uint64(0xFFFFFFFF)).astype(np.int32)
        ordered = both >> np.uint64(32)
        is_same = ordered[1:] == ordered[:-1]
        self._before[order][positions[1:][is_same]] = positions[:-1][is_same]
        is_last = np.append(~is_same, True)
        self._last[order][ordered[is_last]] = positions[is_last]

    def _slot(self, gram: Sequence[int]) -> int:
        hashed = 0
        for token in gram:
            hashed = (hashed + token) * _FACTOR & _BITS
        return (hashed >> 32) * self._slots >> 32


class TokenLookup:
    """Follows the best match of an answer in one text.

    While the answer continues like the text, each token makes the match longer. A match is looked
    up again only when the two differ. Owner: the inference thread.
    """

    def __init__(
        self,
        source: DraftSource,
        text: Callable[[], TokenHistory | None],
        is_own: bool = False,
        from_start: bool = False,
    ) -> None:
        """`is_own`: the text is the answer's own conversation, which ends with the answer."""
        self.source = source
        self.length = START_LENGTH if from_start else 0  # length of the match; 0 = no match
        self._text = text
        self._is_own = is_own
        self._followed = text() if from_start else None
        self._end = 0  # end of the match in `_followed`
        self._is_current = from_start
        self._left = 0  # position where the last match ended; 0 = none

    def take(self, token: int) -> None:
        """Take the answer's next token. Called before the token is in the conversation."""
        text, end = self._followed, self._end
        goes_on = text is not None and text.token_at(end) == token
        if text is not None and goes_on and (self._is_own or text.token_at(end + 1) is not None):
            self._end, self.length = end + 1, self.length + 1
        else:
            if text is not None:
                self._left = end
            self._followed, self.length, self._is_current = None, 0, False

    def look_up(self, tail: list[int]) -> None:
        """Find the best match of the answer's last tokens, unless it is known."""
        if not self._is_current:
            self._is_current = True
            self._followed, self._end, self.length = self._found(tail)
            text = self._text()
            if not self.length and tail and text is not None and self._left:
                # The answer may copy the text with a change. Then the text has the last token near
                # the position where the match ended, and is followed from that token.
                near = text.find_near(self._left, tail[-1])
                if near:
                    self._followed, self._end, self.length = text, near, 1

    def next_tokens(self, count: int) -> list[int]:
        """Return at most `count` tokens that followed the match."""
        return self._next_tokens(self._followed, self._end, (), count)

    def behind(self, ahead: Sequence[int], tail: list[int], count: int) -> tuple[list[int], int]:
        """Return tokens that may follow `tail` and `ahead`, and the match's length."""
        following = self.next_tokens(len(ahead) + count)
        if len(following) > len(ahead) and following[: len(ahead)] == list(ahead):
            return following[len(ahead) :], self.length + len(ahead)
        text, end, length = self._found([*tail, *ahead])
        return self._next_tokens(text, end, ahead, count), length

    def other_tokens(self, than: int, tail: list[int], count: int) -> tuple[list[int], int]:
        """Return the tokens after the best match not followed by `than`, and its length."""
        text, end, length = self._found(tail, than)
        return (text.followed(end, count), length) if text is not None else ([], 0)

    def fitting_token(self, tail: list[int], fits: Fits) -> tuple[list[int], int]:
        """Return the newest fitting token, in a list, and its match's length; ([], 0) if none."""
        text = self._text()
        match = text.find_fitting(tail, fits) if text is not None and tail else None
        if text is None or match is None:
            return [], 0
        return text.followed(match.end, 1), match.length + FEW_LENGTH

    def _found(
        self, tail: list[int], unlike: int = SEPARATOR
    ) -> tuple[TokenHistory | None, int, int]:
        """Return the text, the match's end in it, and its length; (None, 0, 0) without a match."""
        text = self._text()
        match = text.find(tail, unlike) if text is not None else None
        return (text, match.end, match.length) if match is not None else (None, 0, 0)

    def _next_tokens(
        self, text: TokenHistory | None, end: int, ahead: Sequence[int], count: int
    ) -> list[int]:
        """Return the tokens after `end` in a text. At the end the own conversation is repeated."""
        if text is None:
            return []
        tokens = text.followed(end, count)
        if self._is_own and end + len(tokens) == len(text):
            tokens += ahead
            period = len(tokens)
            while period and len(tokens) < count:
                tokens.append(tokens[-period])
        return tokens[:count]
