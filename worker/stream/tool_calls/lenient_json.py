"""Makes strict JSON, piece by piece, of the JSON that models write.

Reads single quotes, unquoted keys and values, Python's literals, missing and trailing commas,
raw newlines, bad escapes and quotes that should have been escaped. Output is never taken back.
Valid JSON keeps its values and the spelling of its numbers.
"""

import json
import math
from dataclasses import dataclass
from typing import Any, Final

import regex

from hearth.worker.stream.lookahead_buffer import LookaheadBuffer, Marks, ParserSteps, WriteText

_BLANKS: Final = regex.compile(r"\s*+")
_BLANKS_OR_COMMAS: Final = regex.compile(r"[\s,]*+")
_HEX: Final = regex.compile(r"[0-9a-fA-F]{4}")
_HEXES: Final = regex.compile(r"[0-9a-fA-F]*+")
_BARE_KEY: Final = regex.compile(r"[\w$][\w$.-]*+")
_BARE_KEY_AND_COLON: Final = regex.compile(r"[\w$][\w$.-]*+\s*+[:=]")
_NUMBER: Final = regex.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", regex.ASCII)
_LOOSE_NUMBER: Final = regex.compile(r"([+-]?)0*(\d*)(?:\.(\d*))?((?:[eE][+-]?\d+)?)", regex.ASCII)
_CLOSES: Final = {"{": "}", "[": "]"}
_OPENS: Final = {"}": "{", "]": "["}
_ESCAPES: Final = {
    **{c: c for c in "\"'\\/"},
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
}
_LITERALS: Final = {
    **{"true": "true", "false": "false", "null": "null"},
    **{"True": "true", "False": "false", "None": "null"},
}
# A key in quotes of one kind, and its colon. Text of more than 80 characters also counts as a key.
_KEYS: Final = {
    quote: regex.compile(
        rf"{quote}(?:[^{quote}\\\n]|\\.){{0,80}}+(?:{quote}\s*+:|[^{quote}])", regex.DOTALL
    )
    for quote in "\"'"
}
# Characters that never directly follow the end of JSON. Before such a character, a quote and
# brackets are text of a string: "awk '{print "x"}' file".
_NEVER_FOLLOW: Final = frozenset("'\"/\\)$|&")


@dataclass(slots=True)
class _Frame:
    """An open object or array."""

    opener: str
    count: int = 0  # number of written members
    has_bare_keys: bool = False


class LenientJsonParser:
    """Reads values from a buffer and writes them as strict JSON.

    The JSON ends at one of the marks `ends`. Inside a string, such a mark counts only before a raw
    newline or the end of the text. Some formats put the mark `quote` around strings; these strings
    have no escapes. `outer` holds the opening brackets around the next value.
    Owner: the inference thread.
    """

    def __init__(
        self, buffer: LookaheadBuffer, ends: tuple[str, ...] = (), quote: str = ""
    ) -> None:
        self.outer = ""
        self.is_closed = False  # the closing brace of the outer object was read
        self._buffer = buffer
        self._ends = tuple(filter(None, ends))
        # The quotes by their first character:
        self._quotes = {'"': ('"""', '"'), "'": ("'''", "'"), quote[:1]: (quote,)}
        self._frames: list[_Frame] = []
        self._in_string = {
            **{mark: Marks(mark, "\\", *self._ends) for mark in ('"', "'", '"""', "'''")},
            quote: Marks(quote),
        }
        self._bare_value_ends = Marks(*',}]{["\n', quote, *self._ends)

    def value(self, write: WriteText) -> ParserSteps[bool]:
        """Write the next value, and return whether it was complete.

        An incomplete value is closed, unless the text was cut off in the value. Without a value,
        nothing is written.
        """
        self._frames = []
        prefix: str | None = ""
        while prefix is not None:
            yield from self._begin(prefix, write)
            prefix = yield from self._next(write)
        is_whole = not self._frames and not self._is_unclosed
        if not (yield from self._is_cut()):
            write("".join(_CLOSES[frame.opener] for frame in reversed(self._frames)))
        self._frames = []
        return is_whole

    def string(self, write: WriteText) -> ParserSteps[bool]:
        """Write the text of the string that begins here, and return whether it was closed."""
        return (yield from self._string((yield from self._opening_quote()), write))

    def key(self) -> ParserSteps[str | None]:
        """Return the next key of the outer object; None at its end; "" for text that is no key.

        The colon after a key is read, too, and so is the brace that closes the object.
        """
        yield from self._buffer.skip(_BLANKS_OR_COMMAS)
        char = yield from self._peek()
        self.is_closed = char == "}"
        if self.is_closed:
            self._buffer.at += 1
        if not char or self.is_closed:
            return None
        return (yield from self._key()) or ""

    def blanks(self) -> ParserSteps[str]:
        """Read blanks, and return the character after them; "" at an end."""
        yield from self._buffer.skip(_BLANKS)
        return (yield from self._peek())

    def word(self) -> ParserSteps[str]:
        """Read a value without quotes, and return it as JSON; "" if none stands here.

        The value is a number, a literal of JSON or Python, or otherwise a string.
        """
        text, mark = yield from self._buffer.text_up_to(self._bare_value_ends)
        self._buffer.at -= len(mark)
        text = text.strip()
        return text and (_LITERALS.get(text) or _number(text) or f'"{json_text(text)}"')

    # ------------------------------------------------------------ one value

    def _begin(self, prefix: str, write: WriteText) -> ParserSteps[None]:
        """Write the value that begins here, but only the opening bracket of an object or array."""
        self._is_unclosed = False
        char = yield from self.blanks()
        mark = yield from self._opening_quote()
        if mark:
            self._member(prefix + '"', write)
            self._is_unclosed = not (
                yield from self._string(mark, lambda text: write(json_text(text)))
            )
            if not self._is_unclosed or not (yield from self._is_cut()):
                write('"')
        elif char in _CLOSES:
            self._buffer.at += 1
            self._member(prefix + char, write)
            self._frames.append(_Frame(char))
        elif char and char not in _OPENS:
            word = yield from self.word()
            if word and not (yield from self._is_cut()):
                self._member(prefix + word, write)

    def _member(self, text: str, write: WriteText) -> None:
        if self._frames:
            self._frames[-1].count += 1
        write(text)

    # ------------------------------------------------------------ between values

    def _next(self, write: WriteText) -> ParserSteps[str | None]:
        """Return the JSON to write before the next value; None if there is no more value.

        Objects and arrays that end here are closed.
        """
        while self._frames:
            frame = self._frames[-1]
            yield from self._buffer.skip(_BLANKS_OR_COMMAS)
            char = yield from self._peek()
            if not char:
                return None
            comma = ", " if frame.count else ""
            if char in _OPENS:
                self._buffer.at += 1
                self._close(_OPENS[char], write)
            elif frame.opener == "[":
                return comma
            else:
                key = yield from self._key()
                if key is not None:
                    return f'{comma}"{json_text(key)}": '
        return None

    def _close(self, opener: str, write: WriteText) -> None:
        """Close all frames up to the last with this opener; without such a frame, do nothing."""
        if all(frame.opener != opener for frame in self._frames):
            return
        while True:
            frame = self._frames.pop()
            write(_CLOSES[frame.opener])
            if frame.opener == opener:
                return

    def _key(self) -> ParserSteps[str | None]:
        """Read a key and its colon, and return the key; None if no key stands here.

        At least one character is read in either case.
        """
        mark = yield from self._opening_quote()
        if mark:
            texts: list[str] = []
            yield from self._string(mark, texts.append, is_key=True)
            key = "".join(texts)
        else:
            found = yield from self._buffer.take_match(_BARE_KEY)
            if not found:
                self._buffer.at += 1
                return None
            key = found[0]
            if self._frames:
                self._frames[-1].has_bare_keys = True
        char = yield from self.blanks()
        if char in (":", "="):
            self._buffer.at += 1
        elif char and mark and key.endswith("="):  # the quote opens the value
            self._buffer.at -= 1
            key = key[:-1]
        else:
            return None
        return key

    # ------------------------------------------------------------ strings

    def _opening_quote(self) -> ParserSteps[str]:
        """Read the quote that stands here, and return it; "" without a quote."""
        for quote in self._quotes.get((yield from self._buffer.peek()), ()):
            if (yield from self._buffer.take(quote)):
                return quote
        return ""

    def _string(self, mark: str, write: WriteText, is_key: bool = False) -> ParserSteps[bool]:
        """Write a string's text up to its closing quote, and return whether the quote came."""
        while True:
            found = yield from self._buffer.scan(self._in_string[mark], write)
            if not found:
                return False
            if found == "\\":
                yield from self._escape(write)
            elif found != mark:
                char = yield from self._buffer.peek()
                if char in ("", "\n"):
                    self._buffer.at -= len(found)
                    return False
                write(found)
            elif is_key or len(mark) > 1 or (yield from self._is_closing(mark)):
                return True
            else:
                write(mark)

    def _escape(self, write: WriteText) -> ParserSteps[None]:
        """Write the character that an escape stands for; without an escape, write a backslash."""
        char = yield from self._buffer.peek()
        if char == "u":
            found = yield from self._buffer.take_match(_HEX, 1)
            if found:
                write((yield from self._character(int(found[0], 16))))
                return
        end = (yield from self._buffer.offset_after(_HEXES, 1)) if char == "u" else 0
        if not self._buffer.is_complete and not (yield from self._buffer.peek(end)):
            self._buffer.at += end  # skips an escape that was cut off
        elif char in _ESCAPES:
            self._buffer.at += 1
            write(_ESCAPES[char])
        else:
            write("\\")

    def _character(self, code: int) -> ParserSteps[str]:
        """Return the character of an escape; two escapes of a surrogate pair are one character.

        A single surrogate cannot be encoded: U+FFFD stands for it.
        """
        if not 0xD800 <= code <= 0xDFFF:
            return chr(code)
        if code < 0xDC00 and (yield from self._buffer.starts("\\u")):
            found = yield from self._buffer.match(_HEX, 2)
            if found and 0xDC00 <= (low := int(found[0], 16)) <= 0xDFFF:
                self._buffer.at += 6
                return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
        return "" if code < 0xDC00 and (yield from self._ends_in_escape()) else "\ufffd"

    def _ends_in_escape(self) -> ParserSteps[bool]:
        """Return whether the text was cut off within an escape, or where an escape may begin."""
        if self._buffer.is_complete:
            return False
        end = int((yield from self._buffer.starts("\\")))
        if (yield from self._buffer.starts("\\u")):
            end = yield from self._buffer.offset_after(_HEXES, 2)
        return not (yield from self._buffer.peek(end))

    def _is_closing(self, quote: str) -> ParserSteps[bool]:
        """Return whether the next text shows that the quote that was read closes its string."""
        openers = self.outer + "".join(frame.opener for frame in self._frames)
        blanks = yield from self._buffer.offset_after(_BLANKS)
        offset = blanks
        while True:
            char = yield from self._buffer.peek(offset)
            if not char or (yield from self._is_end(offset)):
                return True
            if char == ",":
                return openers[-1:] != "{" or (yield from self._leads_on(quote, offset + 1))
            if char not in _OPENS:
                # The comma may be missing before a key on a new line.
                has_key = openers[-1:] == "{" and offset == blanks > 0 and char == quote
                return has_key and (yield from self._is_key(_KEYS[quote], offset))
            if openers and openers[-1] != _OPENS[char]:
                return False
            openers = openers[:-1]
            offset += 1
            if not openers:
                return (yield from self._buffer.peek(offset)) not in _NEVER_FOLLOW
            offset = yield from self._buffer.offset_after(_BLANKS, offset)

    def _leads_on(self, quote: str, offset: int) -> ParserSteps[bool]:
        """Return whether an object goes on after the comma before `offset`."""
        offset = yield from self._buffer.offset_after(_BLANKS_OR_COMMAS, offset)
        char = yield from self._buffer.peek(offset)
        if not char or char in _OPENS or (yield from self._is_end(offset)):
            return True
        if char in _KEYS:
            return (yield from self._is_key(_KEYS[char], offset))
        if not self._frames or not self._frames[-1].has_bare_keys:
            return False
        return (yield from self._is_key(_BARE_KEY_AND_COLON, offset))

    def _is_key(self, pattern: Any, offset: int) -> ParserSteps[bool]:
        """Return whether a key stands at `offset`; a key that the text's end cuts off counts."""
        return bool((yield from self._buffer.match(pattern, offset, is_lenient=True)))

    # ------------------------------------------------------------ ends

    def _peek(self) -> ParserSteps[str]:
        """Return the next character, "" at an end."""
        is_end = yield from self._is_end(0)
        return "" if is_end else (yield from self._buffer.peek())

    def _is_end(self, offset: int) -> ParserSteps[bool]:
        return (yield from self._buffer.starts_any(self._ends, offset))

    def _is_cut(self) -> ParserSteps[bool]:
        """Return whether the text was cut off here, rather than ended."""
        if (yield from self._is_end(0)) or (yield from self._buffer.peek()):
            return False
        return not self._buffer.is_complete


class Transcoder:
    """Makes one strict JSON value of text in pieces. Owner: the inference thread."""

    def __init__(self) -> None:
        self._buffer = LookaheadBuffer()
        self._written: list[str] = []
        self._steps = LenientJsonParser(self._buffer).value(self._written.append)

    def feed(self, text: str) -> str:
        """Add the next piece of text, and return the JSON that is now certain."""
        self._buffer.add(text)
        return self._read()

    def finish(self, is_complete: bool) -> str:
        """Return the rest of the JSON; close it unless the text was cut off (not `is_complete`)."""
        self._buffer.finish(is_complete)
        return self._read()

    def _read(self) -> str:
        next(self._steps, None)
        text = "".join(self._written)
        self._written.clear()
        return text


def as_json(text: str) -> str:
    """Return strict JSON of a value in JSON or Python; text without quotes becomes a string."""
    transcoder = Transcoder()
    return transcoder.feed(text.strip()) + transcoder.finish(is_complete=True)


def json_text(text: str) -> str:
    """Return `text` escaped as between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _number(text: str) -> str:
    """Return a number as JSON spells it, "" if `text` is no number."""
    if _NUMBER.fullmatch(text):
        return text if math.isfinite(float(text)) else ""
    found = _LOOSE_NUMBER.fullmatch(text)
    if not found or not (found[2] or found[3]):
        return ""
    sign, whole, fraction, exponent = found.groups()
    point = "" if fraction is None else f".{fraction or '0'}"
    return f"{sign.strip('+')}{whole or '0'}{point}{exponent}"
