"""Buffers text that arrives in pieces, for parsers that wait where they cannot decide yet.

A parser is a generator that yields where it needs more text, so that the result does not
depend on how the text was cut into pieces. Offsets count from `LookaheadBuffer.at`, which keeps its
place in the text while a method waits.
"""

from collections.abc import Callable, Generator, Iterable
from typing import Any, Final, TypeVar

import regex

T = TypeVar("T")
ParserSteps = Generator[None, None, T]  # yields while it waits, returns its result
WriteText = Callable[[str], None]

TRIM_CHARS: Final = 4_096  # read text is dropped once it is longer than this
KEEP_CHARS: Final = 256  # characters kept of the text already read; every mark is shorter


class UnreadableOutput(Exception):
    """The text that seemed to be a call is no call."""


class Marks:
    """Strings to search for. Of two marks at one position, the longer counts. Immutable."""

    def __init__(self, *marks: str) -> None:
        longest_first = sorted(set(filter(None, marks)), key=len, reverse=True)
        self.pattern = regex.compile("|".join(map(regex.escape, longest_first)) or r"(?!)")
        self._beginnings = {mark[:end] for mark in longest_first for end in range(1, len(mark))}
        self._partial_max = max(map(len, longest_first), default=1) - 1

    def find(self, text: str, at: int, is_over: bool) -> tuple[int, str]:
        """Return the position of the first mark from `at` on, and the mark.

        Without a mark, return "" and the position where a mark may still begin, or the text's end.
        """
        found = self.pattern.search(text, at)
        start = found.start() if found else len(text)
        if not is_over:
            for partial in range(max(at, len(text) - self._partial_max), min(start + 1, len(text))):
                if text[partial:] in self._beginnings:
                    return partial, ""
        return start, found[0] if found else ""


class LookaheadBuffer:
    """Keeps the text of one answer that has arrived so far. Owner: the inference thread.

    Invariant: `0 <= at <= len(text)`, and the text on hold begins at or before `at`.
    """

    def __init__(self) -> None:
        self.at = 0  # the text before this index was read
        self.is_over = False
        self.is_complete = False  # whether the model has ended its turn
        self._text = ""
        self._dropped_chars = 0  # characters before `_text`
        self._held_from: int | None = None  # index from which the text may be read again
        self.keeps_all = False  # no text is dropped

    @property
    def position(self) -> int:
        """How many characters of the answer were read."""
        return self._dropped_chars + self.at

    def add(self, text: str) -> None:
        """Append the next piece."""
        assert not self.is_over and 0 <= self.at <= len(self._text), (self.at, len(self._text))
        if self._held_from is None and not self.keeps_all and self.at > TRIM_CHARS:
            self._dropped_chars += self.at - KEEP_CHARS
            self._text, self.at = self._text[self.at - KEEP_CHARS :], KEEP_CHARS
        self._text += text

    def finish(self, is_complete: bool) -> None:
        """End the text: no more of it comes."""
        assert not self.is_over
        self.is_over, self.is_complete = True, is_complete

    def hold(self, chars_back: int = 0) -> None:
        """Keep the text from `chars_back` characters before `at` on, for `rewind`."""
        self._held_from = self.at - chars_back
        assert 0 <= self._held_from <= self.at, (self._held_from, self.at, chars_back)

    def release(self) -> None:
        """End the hold: the text that was read is not read again."""
        self._held_from = None

    def rewind(self) -> int:
        """Go back to where the hold began, and return how many characters will be read again."""
        assert self._held_from is not None
        count = self.at - self._held_from
        assert count >= 0, (self._held_from, self.at)
        self.at, self._held_from = self._held_from, None
        return count

    def text_since(self, position: int) -> str:
        """Return the text that was read from `position` on. It must have been kept."""
        return self._text[position - self._dropped_chars : self.at]

    def char_before(self, count: int) -> str:
        """Return the character before the last `count` that were read, "" at the beginning."""
        index = self.at - count - 1
        return self._text[index] if index >= 0 else ""

    def peek(self, offset: int = 0) -> ParserSteps[str]:
        """Return the character at `offset`, "" if the text ends before it."""
        while self.at + offset >= len(self._text):
            if self.is_over:
                return ""
            yield
        return self._text[self.at + offset]

    def starts(self, mark: str, offset: int = 0) -> ParserSteps[bool]:
        """Return whether `mark` stands at `offset`; an empty mark never does."""
        while True:
            start = self.at + offset
            if self._text.startswith(mark, start):
                return bool(mark)
            if self.is_over or not mark.startswith(self._text[start : start + len(mark)]):
                return False
            yield

    def starts_any(self, marks: Iterable[str], offset: int = 0) -> ParserSteps[bool]:
        """Return whether one of the marks stands at `offset`."""
        for mark in marks:
            if (yield from self.starts(mark, offset)):
                return True
        return False

    def take(self, mark: str, offset: int = 0) -> ParserSteps[bool]:
        """Return whether `mark` stands at `offset`; if so, read up to its end."""
        is_there = yield from self.starts(mark, offset)
        self.at += offset + len(mark) if is_there else 0
        return is_there

    def offset_after(self, pattern: Any, offset: int = 0) -> ParserSteps[int]:
        """Return the offset after the match of `pattern`, which matches a run of characters."""
        while True:
            end = pattern.match(self._text, self.at + offset).end()
            offset = end - self.at
            if self._text[end : end + 2] not in ("", "\\") or self.is_over:
                return offset
            yield

    def skip(self, pattern: Any) -> ParserSteps[None]:
        """Read the match of `pattern` that begins here; the pattern matches a run of characters.

        The code is not `at += yield from offset_after(...)`: that would use `at` as it was before
        the wait, and `add` moves `at` when it drops text.
        """
        count = yield from self.offset_after(pattern)
        self.at += count

    def match(self, pattern: Any, offset: int = 0, is_lenient: bool = False) -> ParserSteps[Any]:
        """Return the match of `pattern` at `offset`; None without a match.

        The alternatives of a pattern must exclude each other. `is_lenient`: a match that the end of
        the text cuts off counts as a match.
        """
        while True:
            start = self.at + offset
            found = pattern.match(self._text, start, partial=is_lenient or not self.is_over)
            is_open = found is not None and found.end() == len(self._text)
            if not is_open or self.is_over:
                return found
            yield

    def take_match(self, pattern: Any, offset: int = 0) -> ParserSteps[Any]:
        """Return the result of `match`; read up to the end of the match, if there is one."""
        found = yield from self.match(pattern, offset)
        self.at += offset + len(found[0]) if found else 0
        return found

    def text_up_to(self, marks: Marks) -> ParserSteps[tuple[str, str]]:
        """Read the text up to the first mark and the mark itself, like `scan`; return both."""
        texts: list[str] = []
        mark = yield from self.scan(marks, texts.append)
        return "".join(texts), mark

    def scan(self, marks: Marks, write: WriteText) -> ParserSteps[str]:
        """Write the text up to the first mark, read the mark, and return it.

        Return "" where the text ends without a mark. While `write` runs, `position` is the end of
        the text that it gets.
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
