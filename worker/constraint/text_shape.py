"""Follows text of a known shape as it is written, and says what it must go on with.

A shape is made of parts that read bytes and of parts that stand for others. What is followed is a
set of places, each a part with what comes behind it: in calls hardly ever more than a few. Nothing
here is a client's program: each step costs what the bytes and the places do, and no more.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

PLACES_MAX: Final = 512  # a text that may be in more is followed no more
STEPS_MAX: Final = 1_024  # parts that are read for one text, which may fit in many ways
REST_BYTES_MAX: Final = 128  # of one part that are told at once, whatever a client calls things
WHOLE: Final = -1  # the state of a part that has read all of it
WRONG: Final = -2  # and of one that the text does not fit

_QUOTE, _ESCAPE = b'"\\'
_SPECIAL: Final = re.compile(rb'["\\\x00-\x1f]')  # in a string of JSON
_NUMBER: Final = re.compile(rb"[-+.eE0-9]*")
_OPENING: Final = b"[{"
_CLOSING: Final = b"]}"
_BEHIND_VALUE: Final = b",]})< \n\t\r"  # in any format: a bare word has none of them


class Reader:
    """A part that reads bytes. Immutable; a state is a number, 0 at first."""

    def read(self, state: int, text: bytes, start: int) -> tuple[int, int]:
        """Read on from `start`; return the place behind what was read, and the state there.

        It reads to the text's end, or is WHOLE or WRONG.
        """
        raise NotImplementedError

    def rest(self, state: int) -> bytes:
        """Return what must come next; b"" where that is not known."""
        return b""


class Branch:
    """A part that stands for others. Immutable; a state is a number, 0 at first."""

    def ways(self, state: int, behind: "Place | None") -> "Iterator[Place | None]":
        """Yield the places that it stands for."""
        raise NotImplementedError


Shape = Reader | Branch


class Place(NamedTuple):
    """Where a text may be: in a part, with what comes behind it; None is the end of all."""

    shape: Shape
    state: int
    behind: "Place | None"


# ---------------------------------------------------------------- parts that read


@dataclass(frozen=True, slots=True, eq=False)
class Literal(Reader):
    """These bytes. The state is how many of them were read."""

    text: bytes

    def read(self, state: int, text: bytes, start: int) -> tuple[int, int]:
        rest = len(self.text) - state
        if len(text) - start >= rest:
            return start + rest, WHOLE if text.startswith(self.text[state:], start) else WRONG
        is_right = self.text.startswith(text[start:], state)
        return len(text), state + len(text) - start if is_right else WRONG

    def rest(self, state: int) -> bytes:
        return self.text[state : state + REST_BYTES_MAX]


@dataclass(frozen=True, slots=True, eq=False)
class JsonString(Reader):
    """The rest of a string of JSON, its closing quote too. The state: 1 behind a backslash."""

    def read(self, state: int, text: bytes, start: int) -> tuple[int, int]:
        at = start + state
        while at < len(text):
            found = _SPECIAL.search(text, at)
            if found is None:
                return len(text), 0
            at = found.start()
            if text[at] == _QUOTE:
                return at + 1, WHOLE
            if text[at] != _ESCAPE:
                return at, WRONG
            at += 2
        return len(text), at - len(text)


@dataclass(frozen=True, slots=True, eq=False)
class TextUntil(Reader):
    """Any text, and the mark that ends it. The state is how much of the mark was read."""

    end: bytes

    def read(self, state: int, text: bytes, start: int) -> tuple[int, int]:
        size = len(self.end)
        joined = self.end[:state] + text[start : start + size]  # the mark may have begun before
        at = joined.find(self.end)
        if at >= 0:
            return start + at - state + size, WHOLE
        if (at := text.find(self.end, start)) >= 0:
            return at + size, WHOLE
        joined = joined if len(text) - start <= size else text[1 - size :]
        lengths = range(min(size - 1, len(joined)), 0, -1)
        return len(text), next((n for n in lengths if joined.endswith(self.end[:n])), 0)


@dataclass(frozen=True, slots=True, eq=False)
class JsonNumber(Reader):
    """A number; the byte behind it tells that it is whole. The state: 1 once it has begun."""

    def read(self, state: int, text: bytes, start: int) -> tuple[int, int]:
        found = _NUMBER.match(text, start)
        end = found.end() if found is not None else start
        if end == len(text):
            return end, 1
        return end, WHOLE if state or end > start else WRONG


@dataclass(frozen=True, slots=True, eq=False)
class JsonValue(Reader):
    """Any value of JSON, of which only the end is looked for.

    The state: 0 in front of it, 1 in a bare word or number, else 4 for each array or object that
    is open, and 2 in a string, 3 behind a backslash in one.
    """

    def read(self, state: int, text: bytes, start: int) -> tuple[int, int]:
        for at in range(start, len(text)):
            state = self._behind(state, text[at])
            if state == WHOLE:
                return at + 1, WHOLE
            if state == WRONG:
                return at, WRONG
            if state == _BEFORE:
                return at, WHOLE
        return len(text), state

    @staticmethod
    def _behind(state: int, byte: int) -> int:
        depth, kind = divmod(state, 4)
        if kind >= 2:  # in a string
            if kind == 3:
                return state - 1
            if byte == _ESCAPE:
                return state + 1
            return (state - 2 or WHOLE) if byte == _QUOTE else state
        if kind == 1:
            return _BEFORE if byte in _BEHIND_VALUE else state
        if byte == _QUOTE:
            return state + 2
        if byte in _OPENING:
            return state + 4
        if byte in _CLOSING:
            return (state - 4 or WHOLE) if depth else WRONG
        return state if depth or byte in b" \n\t\r" else 1


_BEFORE: Final = -3  # the value was whole in front of this byte


# ---------------------------------------------------------------- parts that stand for others


@dataclass(frozen=True, slots=True, eq=False)
class Row(Branch):
    """Parts one behind the other, maybe none."""

    parts: Sequence[Shape] = ()

    def ways(self, state: int, behind: Place | None) -> Iterator[Place | None]:
        for part in reversed(self.parts):
            behind = Place(part, 0, behind)
        yield behind


@dataclass(frozen=True, slots=True, eq=False)
class Choice(Branch):
    """One of some parts."""

    parts: Sequence[Shape]

    def ways(self, state: int, behind: Place | None) -> Iterator[Place | None]:
        for part in self.parts:
            yield Place(part, 0, behind)


@dataclass(frozen=True, slots=True, eq=False)
class Repeated(Branch):
    """A part, which is not empty, any number of times."""

    part: Shape

    def ways(self, state: int, behind: Place | None) -> Iterator[Place | None]:
        yield behind
        yield Place(self.part, 0, Place(self, 0, behind))


@dataclass(slots=True)
class Order:
    """Whether members come in their order. One for all that belong together; it may change."""

    is_kept: bool = True


class Member(NamedTuple):
    """Something that stands at most once among others."""

    shape: Shape
    is_required: bool


@dataclass(frozen=True, slots=True, eq=False)
class Members(Branch):
    """Members with a separator between each two, in their order or, where that is not kept, in any.

    The state has a bit for each that has come, so that it grows with the members and not with
    their orders.
    """

    members: Sequence[Member]
    separator: Shape | None
    order: Order

    def ways(self, state: int, behind: Place | None) -> Iterator[Place | None]:
        is_whole, is_in_order = True, self.order.is_kept
        for at, member in enumerate(self.members):
            if state >> at & 1 or (is_in_order and state >> at):
                continue
            place = Place(member.shape, 0, Place(self, state | 1 << at, behind))
            yield Place(self.separator, 0, place) if state and self.separator else place
            if member.is_required:
                is_whole = False
                if is_in_order:
                    break
        if is_whole:
            yield behind


# ---------------------------------------------------------------- where a text is

Places = tuple[Place | None, ...]


class TooWide(Exception):
    """A text may be in too many places."""


def begin(shape: Shape) -> Places:
    """Return the places of a text that has not begun."""
    return tuple(_readers([Place(shape, 0, None)]))


def behind(places: Places, text: bytes, steps_max: int = STEPS_MAX) -> tuple[Places, int]:
    """Return where a text is when `text` has come, and what of it came behind its end, in bytes.

    There are no places where the text ended before, or does not fit: then 0 came behind it.
    Raises TooWide.
    """
    if len(places) == 1 and text and (place := places[0]) is not None:
        assert isinstance(place.shape, Reader), place.shape
        _, state = place.shape.read(place.state, text, 0)
        if state != WHOLE:  # as nearly always
            return ((Place(place.shape, state, place.behind),), 0) if state != WRONG else ((), 0)
    found: list[Place | None] = []
    left = steps = 0
    stack = [(place, 0) for place in places]
    while stack:
        place, at = stack.pop()
        if at == len(text):
            found.append(place)
        elif place is None:
            left = min(left or len(text), len(text) - at)  # behind the last end that it had
        else:
            assert isinstance(place.shape, Reader), place.shape
            at, state = place.shape.read(place.state, text, at)
            if state == WHOLE:
                stack.extend((each, at) for each in _readers([place.behind]))
            elif state != WRONG:
                found.append(Place(place.shape, state, place.behind))
        steps += 1
        if len(found) + len(stack) > PLACES_MAX or steps > steps_max:
            raise TooWide
    # Two ways to one place are one: else each item of a list could double them.
    return tuple(dict.fromkeys(found)), 0 if found else left


def forced(places: Places, bytes_max: int) -> tuple[bytes, Places]:
    """Return the text that must come next, and where it leads: some `bytes_max` at most.

    Raises TooWide.
    """
    text = b""
    while places and len(text) < bytes_max:
        rests = [
            place.shape.rest(place.state) if place and isinstance(place.shape, Reader) else b""
            for place in places
        ]
        must = rests[0] if len(rests) == 1 else common(rests)
        if not must:
            break
        text += must
        places, _ = behind(places, must)
    return text, places


def common(texts: Sequence[bytes]) -> bytes:
    """Return what all texts begin with: all of them do if the least and the greatest one do."""
    least, greatest = min(texts), max(texts)
    pairs = enumerate(zip(least, greatest, strict=False))
    return least[: next((at for at, (one, other) in pairs if one != other), len(least))]


def _readers(places: Iterable[Place | None]) -> Iterator[Place | None]:
    """Yield the places that read among those that these stand for, and the end."""
    stack, count = list(places), 0
    while stack:
        place = stack.pop()
        if place is not None and isinstance(place.shape, Branch):
            stack.extend(islice(place.shape.ways(place.state, place.behind), PLACES_MAX + 1))
        else:
            count += 1
            yield place
        if count + len(stack) > PLACES_MAX:  # each of these stands for one at least
            raise TooWide
