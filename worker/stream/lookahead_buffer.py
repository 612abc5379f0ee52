"""Buffers text that arrives in pieces, for parsers that wait where they cannot decide yet.

A parser is a generator: it yields where it needs more text, so what it makes of a text is the
same however the text was cut. Offsets count from `LookaheadBuffer.at`, which stays where it is
while a method waits.
"""

from collections.abc import Callable, Generator, Iterable
from typing import Any, Final, TypeVar

import regex

T = TypeVar("T")
ParserSteps = Generator[None, None, T]  # yields while it waits, returns what it found
WriteText = Callable[[str], None]

TRIM_CHARS: Final = 4_096  # of text that was read, before it is let go
KEEP_CHARS: Final = 256  # of text that was read and can be looked back to: more than any mark has


class UnreadableOutput(Exception):
    """The text that was taken for a call is none."""


class Marks:
    """A set of strings to search for; of two at one place the longer one counts. Immutable."""

    def __init__(self, *marks: str) -> None:
        longest_first = sorted(set(filter(None, marks)), key=len, reverse=True)
        self.pattern = regex.compile("|".join(map(regex.escape, longest_first)) or r"(?!)")
        self._beginnings = {mark[:end] for mark in longest_first for end in range(1, len(mark))}
        self._partial_max = max(map(len, longest_first), default=1) - 1

    def find(self, text: str, at: int, is_over: bool) -> tuple[int, str]:
        """Return where the first mark from `at` stands, and the mark.

        Without a mark: where one may still begin, or the end of the text; and "".
        """
        found = self.pattern.search(text, at)
        start = found.start() if found else len(text)
        if not is_over:
            for partial in range(max(at, len(text) - self._partial_max), min(start + 1, len(text))):
                if text[partial:] in self._beginnings:
                    return partial, ""
        return start, found[0] if found else ""


class LookaheadBuffer:
    """The text of one answer, as far as it has come. Owner: the inference thread.

    Invariant: `0 <= at <= len(text)`, and what is held begins at or before `at`.
    """

    def __init__(self) -> None:
        self.at = 0  # what stands before it was read
        self.is_over = False
        self.is_complete = False  # it is over because the model ended its turn
        self._text = ""
        self._let_go = 0  # characters in front of `_text`
        self._held: int | None = None  # the text from here on may have to be read again
        self.keeps_all = False  # whatever is held

    @property
    def position(self) -> int:
        """How much of the answer was read."""
        return self._let_go + self.at

    def add(self, text: str) -> None:
        """Append the next piece."""
        assert not self.is_over and 0 <= self.at <= len(self._text), (self.at, len(self._text))
        if self._held is None and not self.keeps_all and self.at > TRIM_CHARS:
            self._let_go += self.at - KEEP_CHARS
            self._text, self.at = self._text[self.at - KEEP_CHARS :], KEEP_CHARS
        self._text += text

    def finish(self, is_complete: bool) -> None:
        """Take it that no more text comes."""
        assert not self.is_over
        self.is_over, self.is_complete = True, is_complete

    def hold(self, back: int = 0) -> None:
        """Keep the text from `back` characters before here, so that `rewind` can return to it."""
        self._held = self.at - back
        assert 0 <= self._held <= self.at, (self._held, self.at, back)

    def release(self) -> None:
        """Let go what is held: what was read is not read again."""
        self._held = None

    def rewind(self) -> int:
        """Go back to the held text, and return how many characters will be read again."""
        assert self._held is not None
        count = self.at - self._held
        assert count >= 0, (self._held, self.at)
        self.at, self._held = self._held, None
        return count

    def since(self, position: int) -> str:
        """Return what was read from `position` on, which was kept."""
        return self._text[position - self._let_go : self.at]

    def before(self, count: int) -> str:
        """Return the character in front of the last `count` that were read, "" at the beginning."""
        at = self.at - count - 1
        return self._text[at] if at >= 0 else ""

    def peek(self, offset: int = 0) -> ParserSteps[str]:
        """Return the character at `offset`, "" if the text is over before."""
        while self.at + offset >= len(self._text):
            if self.is_over:
                return ""
            yield
        return self._text[self.at + offset]

    def starts(self, mark: str, offset: int = 0) -> ParserSteps[bool]:
        """Return whether `mark` stands at `offset`; an empty one never does."""
        while True:
            start = self.at + offset
            if self._text.startswith(mark, start):
                return bool(mark)
            if self.is_over or not mark.startswith(self._text[start : start + len(mark)]):
                return False
            yield

    def starts_one(self, marks: Iterable[str], offset: int = 0) -> ParserSteps[bool]:
        """Return whether one of some marks stands at `offset`."""
        for mark in marks:
            if (yield from self.starts(mark, offset)):
                return True
        return False

    def take(self, mark: str, offset: int = 0) -> ParserSteps[bool]:
        """Read up to behind `mark` where it stands at `offset`, and return whether it does."""
        is_there = yield from self.starts(mark, offset)
        self.at += offset + len(mark) if is_there else 0
        return is_there

    def run(self, pattern: Any, offset: int = 0) -> ParserSteps[int]:
        """Return the offset behind what `pattern` matches: characters of a class, or escapes."""
        while True:
            end = pattern.match(self._text, self.at + offset).end()
            offset = end - self.at
            if self._text[end : end + 2] not in ("", "\\") or self.is_over:
                return offset
            yield

    def skip(self, pattern: Any) -> ParserSteps[None]:
        """Read what `pattern` matches here: characters of a class, or escapes.

        Not `at += yield from run(...)`: that takes `at` as it was before the wait, and `add` moves
        it meanwhile where it lets read text go.
        """
        count = yield from self.run(pattern)
        self.at += count

    def match(self, pattern: Any, offset: int = 0, is_lenient: bool = False) -> ParserSteps[Any]:
        """Return the match of `pattern` at `offset`, None if there is none.

        The alternatives of a pattern must exclude each other. `is_lenient`: the beginning of a
        match at the end of the text counts as one.
        """
        while True:
            start = self.at + offset
            found = pattern.match(self._text, start, partial=is_lenient or not self.is_over)
            is_open = found is not None and found.end() == len(self._text)
            if not is_open or self.is_over:
                return found
            yield

    def take_match(self, pattern: Any, offset: int = 0) -> ParserSteps[Any]:
        """Return what `match` does; where that is a match, read up to behind it."""
        found = yield from self.match(pattern, offset)
        self.at += offset + len(found[0]) if found else 0
        return found

    def text_up_to(self, marks: Marks) -> ParserSteps[tuple[str, str]]:
        """Read and return the text up to the first mark, and the mark, as `scan` does."""
        texts: list[str] = []
        mark = yield from self.scan(marks, texts.append)
        return "".join(texts), mark

    def scan(self, marks: Marks, write: WriteText) -> ParserSteps[str]:
        """Write the text up to the first mark, and return the mark; "" where the text is over.

        What is written ends where the buffer is read to. Then the mark is read, too.
        """
        while True:
            found, mark = marks.find(self._text, self.at, self.is_over)
            text, self.at = self._text[self.at : found], found
            if text:
                write(text)
            self.at += len(mark)
            if mark or self.is_over:
                return mark
            yield
