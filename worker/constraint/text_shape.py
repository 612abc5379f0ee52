"""Follows text of a known shape while it is written, and finds the text that must come next.

A shape consists of readers, which read bytes, and branches, which stand for other parts. The state
is a set of positions in the shape, as in a nondeterministic automaton. In calls, the set is small.
For any shape, the time of a step is proportional to the bytes and the positions.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

POSITIONS_MAX: Final = 512  # a text with more possible positions is not followed further
STEPS_MAX: Final = 1_024  # reads of parts for one text, which may fit in many ways
REST_BYTES_MAX: Final = 128  # most bytes of a part that are returned at once: names may be long
COMPLETE: Final = -1  # state of a part that has read all of its text
MISMATCH: Final = -2  # state of a part that the text does not fit

_QUOTE, _ESCAPE = b'"\\'
_SPECIAL: Final = re.compile(rb'["\\\x00-\x1f]')  # bytes that end or escape inside a JSON string
_NUMBER: Final = re.compile(rb"[-+.eE0-9]*")
_OPENING: Final = b"[{"
_CLOSING: Final = b"]}"
_AFTER_VALUE: Final = b",]})< \n\t\r"  # bytes that end a bare word in any format


class Reader:
    """A part that reads bytes. Immutable; a state is a number, 0 at first."""

    def read(self, state: int, text: bytes, start: int) -> tuple[int, int]:
        """Read on from `start`; return the index after the bytes that were read, and the state.

        The part reads to the end of the text, or its state is COMPLETE or MISMATCH.
        """
        raise NotImplementedError

    def rest(self, state: int) -> bytes:
        """Return the bytes that must come next; b"" if that is not known."""
        return b""


class Branch:
    """A part that stands for other parts. Immutable; a state is a number, 0 at first."""

    def expand(self, state: int, following: "Position | None") -> "Iterator[Position | None]":
        """Yield the positions that this part stands for; `following` comes after all of them."""
        raise NotImplementedError


Shape = Reader | Branch


class Position(NamedTuple):
    """A position in a shape: a part, its state, and the position after it.

    None in place of a position is the end of the shape.
    """

    shape: Shape
    state: int
    following: "Position | None"


# ---------------------------------------------------------------- parts that read


@dataclass(frozen=True, slots=True, eq=False)
class Literal(Reader):
    """Reads exactly these bytes. The state is the number of bytes that were read."""

    text: bytes

    def read(self, state: int, text: bytes, start: int) -> tuple[int, int]:
        rest = len(self.text) - state
        if len(text) - start >= rest:
            return start + rest, COMPLETE if text.startswith(self.text[state:], start) else MISMATCH
        is_right = self.text.startswith(text[start:], state)
        return len(text), state + len(text) - start if is_right else MISMATCH

    def rest(self, state: int) -> bytes:
        return self.text[state : state + REST_BYTES_MAX]


@dataclass(frozen=True, slots=True, eq=False)
class JsonString(Reader):
    """Reads the rest of a JSON string with its closing quote. The state is 1 after a backslash."""

    def read(self, state: int, text: bytes, start: int) -> tuple[int, int]:
        index = start + state
        while index < len(text):
            found = _SPECIAL.search(text, index)
            if found is None:
                return len(text), 0
            index = found.start()
            if text[index] == _QUOTE:
                return index + 1, COMPLETE
            if text[index] != _ESCAPE:
                return index, MISMATCH
            index += 2
        return len(text), index - len(text)


@dataclass(frozen=True, slots=True, eq=False)
class TextUntil(Reader):
    """Reads any text and the mark that ends it. The state counts the read bytes of the mark."""

    end: bytes

    def read(self, state: int, text: bytes, start: int) -> tuple[int, int]:
        size = len(self.end)
        joined = self.end[:state] + text[start : start + size]  # the mark may have begun before
        index = joined.find(self.end)
        if index >= 0:
            return start + index - state + size, COMPLETE
        if (index := text.find(self.end, start)) >= 0:
            return index + size, COMPLETE
        joined = joined if len(text) - start <= size else text[1 - size :]
        lengths = range(min(size - 1, len(joined)), 0, -1)
        return len(text), next((n for n in lengths if joined.endswith(self.end[:n])), 0)


@dataclass(frozen=True, slots=True, eq=False)
class JsonNumber(Reader):
    """Reads a number, which ends before the first other byte. The state is 1 once it has begun."""

    def read(self, state: int, text: bytes, start: int) -> tuple[int, int]:
        found = _NUMBER.match(text, start)
        end = found.end() if found is not None else start
        if end == len(text):
            return end, 1
        return end, COMPLETE if state or end > start else MISMATCH


@dataclass(frozen=True, slots=True, eq=False)
class JsonValue(Reader):
    """Reads any JSON value, of which only the end is searched.

    The state is 0 before the value and 1 in a bare word or number. Otherwise it is 4 for each open
    array or object, plus 2 in a string, or plus 3 after a backslash in a string.
    """

    def read(self, state: int, text: bytes, start: int) -> tuple[int, int]:
        for index in range(start, len(text)):
            state = self._next_state(state, text[index])
            if state == COMPLETE:
                return index + 1, COMPLETE
            if state == MISMATCH:
                return index, MISMATCH
            if state == _ENDED_BEFORE:
                return index, COMPLETE
        return len(text), state

    @staticmethod
    def _next_state(state: int, byte: int) -> int:
        depth, kind = divmod(state, 4)
        if kind >= 2:  # the position is inside a string
            if kind == 3:
                return state - 1
            if byte == _ESCAPE:
                return state + 1
            return (state - 2 or COMPLETE) if byte == _QUOTE else state
        if kind == 1:
            return _ENDED_BEFORE if byte in _AFTER_VALUE else state
        if byte == _QUOTE:
            return state + 2
        if byte in _OPENING:
            return state + 4
        if byte in _CLOSING:
            return (state - 4 or COMPLETE) if depth else MISMATCH
        return state if depth or byte in b" \n\t\r" else 1


_ENDED_BEFORE: Final = -3  # state of a value that ended before this byte


# ---------------------------------------------------------------- parts that stand for other parts


@dataclass(frozen=True, slots=True, eq=False)
class Concat(Branch):
    """Parts one after another, maybe none."""

    parts: Sequence[Shape] = ()

    def expand(self, state: int, following: Position | None) -> Iterator[Position | None]:
        for part in reversed(self.parts):
            following = Position(part, 0, following)
        yield following


@dataclass(frozen=True, slots=True, eq=False)
class Choice(Branch):
    """One of several parts."""

    parts: Sequence[Shape]

    def expand(self, state: int, following: Position | None) -> Iterator[Position | None]:
        for part in self.parts:
            yield Position(part, 0, following)


@dataclass(frozen=True, slots=True, eq=False)
class Repeated(Branch):
    """A part any number of times; the part must not be empty."""

    part: Shape

    def expand(self, state: int, following: Position | None) -> Iterator[Position | None]:
        yield following
        yield Position(self.part, 0, Position(self, 0, following))


@dataclass(slots=True)
class Order:
    """Whether members come in the schema's order. One changeable Order serves a whole shape."""

    is_kept: bool = True


class Member(NamedTuple):
    """A part that may stand once among other members."""

    shape: Shape
    is_required: bool


@dataclass(frozen=True, slots=True, eq=False)
class Members(Branch):
    """Members with separators between them, in the given order unless `order` allows any.

    The state has a bit for each member that was read, so it does not grow with the number of
    possible orders.
    """

    members: Sequence[Member]
    separator: Shape | None
    order: Order

    def expand(self, state: int, following: Position | None) -> Iterator[Position | None]:
        is_whole, is_in_order = True, self.order.is_kept
        for index, member in enumerate(self.members):
            if state >> index & 1 or (is_in_order and state >> index):
                continue
            position = Position(member.shape, 0, Position(self, state | 1 << index, following))
            yield Position(self.separator, 0, position) if state and self.separator else position
            if member.is_required:
                is_whole = False
                if is_in_order:
                    break
        if is_whole:
            yield following


# ---------------------------------------------------------------- the positions of a text

Positions = tuple[Position | None, ...]


class TooManyPositions(Exception):
    """A text has too many possible positions."""


def start_positions(shape: Shape) -> Positions:
    """Return the positions before any text."""
    return tuple(_readers([Position(shape, 0, None)]))


def advance(positions: Positions, text: bytes, steps_max: int = STEPS_MAX) -> tuple[Positions, int]:
    """Return the positions after `text`, and the number of its bytes after the shape's end.

    There are no positions if the shape ended before the end of `text`, or if `text` does not fit;
    in the latter case the number is 0. Raises TooManyPositions.
    """
    if len(positions) == 1 and text and (position := positions[0]) is not None:
        assert isinstance(position.shape, Reader), position.shape
        _, state = position.shape.read(position.state, text, 0)
        if state != COMPLETE:  # the usual case
            return (
                ((Position(position.shape, state, position.following),), 0)
                if state != MISMATCH
                else ((), 0)
            )
    found: list[Position | None] = []
    left = steps = 0
    stack = [(position, 0) for position in positions]
    while stack:
        position, index = stack.pop()
        if index == len(text):
            found.append(position)
        elif position is None:
            left = min(left or len(text), len(text) - index)  # after the last possible end
        else:
            assert isinstance(position.shape, Reader), position.shape
            index, state = position.shape.read(position.state, text, index)
            if state == COMPLETE:
                stack.extend((reader, index) for reader in _readers([position.following]))
            elif state != MISMATCH:
                found.append(Position(position.shape, state, position.following))
        steps += 1
        if len(found) + len(stack) > POSITIONS_MAX or steps > steps_max:
            raise TooManyPositions
    # Equal positions are merged: otherwise each item of a list could double their number.
    return tuple(dict.fromkeys(found)), 0 if found else left


def forced_text(positions: Positions, bytes_max: int) -> tuple[bytes, Positions]:
    """Return the text that must come next, and the positions after it.

    The search ends once the text has `bytes_max` bytes. Raises TooManyPositions.
    """
    text = b""
    while positions and len(text) < bytes_max:
        rests = [
            position.shape.rest(position.state)
            if position and isinstance(position.shape, Reader)
            else b""
            for position in positions
        ]
        forced = rests[0] if len(rests) == 1 else common_prefix(rests)
        if not forced:
            break
        text += forced
        positions, _ = advance(positions, forced)
    return text, positions


def common_prefix(texts: Sequence[bytes]) -> bytes:
    """Return the common beginning of all texts, which the least and the greatest text share."""
    least, greatest = min(texts), max(texts)
    pairs = enumerate(zip(least, greatest, strict=False))
    return least[: next((index for index, (a, b) in pairs if a != b), len(least))]


def _readers(positions: Iterable[Position | None]) -> Iterator[Position | None]:
    """Yield what the positions stand for: positions of readers, and None for the end."""
    stack, count = list(positions), 0
    while stack:
        position = stack.pop()
        if position is not None and isinstance(position.shape, Branch):
            stack.extend(
                islice(position.shape.expand(position.state, position.following), POSITIONS_MAX + 1)
            )
        else:
            count += 1
            yield position
        if count + len(stack) > POSITIONS_MAX:  # each stands for at least one reader
            raise TooManyPositions
