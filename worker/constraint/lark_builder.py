"""Builds grammars in llguidance's dialect of Lark.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from hearth.shared.errors import RequestError

# A blank behind a separator is what templates write; more of it has a weak model write blanks
# until its answer is cut off.
JSON_OPTIONS: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
RULES_MAX: Final = 10_000
GRAMMAR_CHARS_MAX: Final = 2_000_000  # of all schemas in it together
LENIENT: Final = {"lenient": True}  # keywords that llguidance does not know are left unenforced


class Expression(str):
    """A piece of Lark source. In a row with such pieces any other string is literal text."""


NOTHING: Final = Expression('""')
TEXT: Final = Expression("TEXT")  # at least one character, and no mark
NEWLINES: Final = Expression("(NEWLINES)?")  # at most three: ERNIE writes those
NEWLINE: Final = Expression('("\\n")?')  # at most one
_HEAD: Final = "%llguidance {}\nTEXT: /(?s:.+)/\nNEWLINES: /\\n{1,3}/\n"


class Lark:
    """One grammar in the making. Owner: the prompt thread.

    Invariants: a mark is a token that no other text is made of; literal text that quotes it stands
    for that token, and free text never holds it. At most RULES_MAX rules.
    """

    line_end: Expression = NEWLINE  # behind what templates end a line with

    def __init__(self, marks: Mapping[str, int]) -> None:
        assert "" not in marks, "an empty mark would split every text"
        self._marks = marks
        longest_first = sorted(marks, key=len, reverse=True)
        # A newline stands alone: llguidance's lexer never goes back from a literal that begins with
        # one to the newline alone.
        self._split = re.compile("(" + "|".join(map(re.escape, [*longest_first, "\n"])) + ")")
        self._rules: list[str] = []
        self._chars = 0  # of their bodies

    def row(self, *parts: str) -> Expression:
        """Return the parts one behind the other; strings that are no expression are literal."""
        found = [part if isinstance(part, Expression) else self._literal(part) for part in parts]
        return Expression(" ".join(part for part in found if part != NOTHING) or NOTHING)

    @staticmethod
    def quoted(text: str) -> Expression:
        """Return a client's text: no mark, whatever it spells out."""
        return Expression(json.dumps(text))

    def any_of(self, choices: Iterable[str]) -> Expression:
        """Return that one of the choices stands here."""
        return self.rule(" | ".join(self.row(choice) for choice in choices))

    def optional(self, *parts: str) -> Expression:
        return Expression(f"({self.row(*parts)})?")

    def repeated(self, *parts: str) -> Expression:
        """Return that the row stands here any number of times."""
        return Expression(f"({self.row(*parts)})*")

    def text_until(self, end: str, characters_max: int | None = None, but: str = "") -> Expression:
        """Return free text, maybe none, without the characters `but`, and the `end` behind it."""
        assert end and (characters_max is None or characters_max >= 0), (end, characters_max)
        # Lark's expressions stand on one line.
        character = "[^{}]".format(re.escape(but).replace("\n", "n")) if but else "(?s:.)"
        text = f"{character}{'*' if characters_max is None else f'{{0,{characters_max}}}'}"
        before, mark, *_ = (*self._split.split(end, maxsplit=1), "")
        if mark:  # what stands in front of the mark ends the text
            before = re.escape(before).replace("/", r"\/")
            return self.row(self.rule(f"/{text}{before}/"), end[end.index(mark) :])
        return self.rule(f"/{text}/", f"[suffix={json.dumps(end)}]")

    def json(self, schema: Mapping[str, Any], **options: Any) -> Expression:
        """Return a JSON value of this schema, a document of its own."""
        document = {**schema, "x-guidance": {**JSON_OPTIONS, **options}}
        return self.rule(f"%json {json.dumps(document)}")

    def elements(self, items: Sequence[tuple[str, bool]]) -> Expression:
        """Return items (expression, is required) in their order, one behind the other."""
        return self.row(*(item if needed else self.optional(item) for item, needed in items))

    def separated(self, items: Sequence[tuple[str, bool]], separator: str) -> Expression:
        """Return items (expression, is required) in their order, a separator between each two."""
        first, later = NOTHING, NOTHING  # from here on, where none stands in front, or one does
        for item, is_required in reversed(items):
            with_first, with_later = self.row(item, later), self.row(separator, item, later)
            first = self.rule(with_first if is_required else f"{with_first} | {first}")
            later = self.rule(with_later if is_required else f"{with_later} | {later}")
        return first

    def rule(self, body: str, options: str = "") -> Expression:
        """Give a rule a name, which stands for it."""
        if len(self._rules) >= RULES_MAX:
            raise RequestError(
                f"The grammar of what is asked for has over {RULES_MAX:,} rules. Use fewer tools, "
                "or schemas that refer to themselves less.",
                code="invalid_grammar",
            )
        self._chars += len(body)
        if self._chars > GRAMMAR_CHARS_MAX:
            raise RequestError(
                "The grammar of the tools that may be called is too long: the limit for all their "
                f"JSON schemas together is {GRAMMAR_CHARS_MAX:,} characters. Use fewer tools.",
                code="invalid_grammar",
                param="tools",
            )
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}\n")
        return Expression(name)

    def source(self, start: Expression) -> str:
        """Return the grammar of what `start` says."""
        return f"{_HEAD}start: {start}\n{''.join(self._rules)}"

    def _literal(self, text: str) -> Expression:
        found = (
            f"<[{self._marks[piece]}]>"
            if piece in self._marks
            else json.dumps(piece, ensure_ascii=False)
            for piece in self._split.split(text)
            if piece
        )
        return Expression(" ".join(found) or NOTHING)
