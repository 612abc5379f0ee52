"""Tells which tokens a call must go on with, in an answer that no grammar is enforced on.

The shape of calls is made of the grammars' own descriptions of each format (`call_grammars`).
Touches no MLX.
"""

import json
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Final

from hearth.shared.errors import RequestError
from hearth.worker.constraint.call_grammars import NEWLINE, NOTHING, RULES_MAX, Expression, Lark
from hearth.worker.constraint.json_schemas import ToolSchema, resolved, whole
from hearth.worker.constraint.text_shape import (
    Choice,
    JsonNumber,
    JsonString,
    JsonValue,
    Literal,
    Member,
    Members,
    Order,
    Places,
    Repeated,
    Row,
    Shape,
    TextUntil,
    TooWide,
    begin,
    behind,
    common,
    forced,
)

log = logging.getLogger(__name__)

TAIL_BYTES: Final = 64  # of the answer that are looked at for a mark; all are shorter
CALL_BYTES_MAX: Final = 1 << 16  # that may be read again in another order, in milliseconds
CALL_STEPS_MAX: Final = 4_096  # in which it is read again
FORCED_BYTES_MAX: Final = 128  # that are told at once
CHARACTER_BYTES_MAX: Final = 4
TEXTS_MAX: Final = 512  # whose tokens are remembered
DEPTH_MAX: Final = 6  # of values in values; what is deeper is any value
MEMBERS_MAX: Final = 256  # of an object, or choices of a value: more of them are any value
VALUES_MAX: Final = 4_000  # of all tools: further ones are any value, so that none costs much
LITERAL_BYTES_MAX: Final = 2_000_000  # of all names and words, each at each place where it stands
CPU_S_MAX: Final = 1.0  # that a shape may take: one part can take milliseconds to look through
_ANY: Final = JsonValue()
_STRING: Final = Row((Literal(b'"'), JsonString()))
_OF_TYPE: Final[Mapping[Any, Shape]] = {
    "string": _STRING,
    "integer": JsonNumber(),
    "number": JsonNumber(),
    "boolean": Choice((Literal(b"true"), Literal(b"false"))),
    "null": Literal(b"null"),
}
_EMPTY: Final = Row()


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
        self.places: Places = ()  # of the call that is followed, if any
        self._behind_end: bytes | None = None  # where the call may have ended: what came since
        self._is_over = False

    def take(self, tokens: Sequence[int]) -> None:
        """Take the answer's next tokens."""
        for token in tokens:
            if not self._is_over:
                self._take(self._token_bytes(token))

    def forced(self, tokens_max: int) -> list[int]:
        """Return tokens that very likely come next; none where that is not known."""
        assert tokens_max >= 0, tokens_max
        try:
            return self._texts.tokens_behind(self.places)[:tokens_max]
        except TooWide:
            return []

    def fitting(self, ahead: Sequence[int], tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Return how many of `tokens` may come behind `ahead`, and what must come behind them.

        Those are counted up to the first one behind which something must come, and within calls:
        an answer mostly ends behind one, and its end is never worth a draft.
        """
        if not self.places:
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
        return behind(self.places, text)[0] if text else self.places

    def _take(self, text: bytes) -> None:
        """Read what came; what stands behind a call may open the next one."""
        try:
            rest: bytes | None = text
            while rest and not self._is_over:
                rest = self._read(rest) if self.places else self._look_for_a_mark(rest)
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
        self.places = begin(self._shape)
        return mark + since

    # ------------------------------------------------------------ a call

    def _read(self, text: bytes) -> bytes | None:
        """Read on in a call; return what may open another one, None where this one goes on."""
        places, left = behind(self.places, text)
        if not places and not left and self._behind_end is None and self._order.is_kept:
            places, left = self._in_any_order(text)
        if places:
            self.places = places
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
        if self.places == (None,):
            self._clear()
        elif None in self.places:
            self._behind_end = b""
        elif self._behind_end is not None:
            is_near = len(self._behind_end) + len(text) < TAIL_BYTES
            self._behind_end = self._behind_end + text if is_near else None
        if len(self._written) > CALL_BYTES_MAX:
            self._clear()

    def _clear(self) -> None:
        """Follow this call no more; another may begin."""
        self.places, self._behind_end = (), None
        self._written.clear()


def _is_in(places: Places, text: bytes) -> bool:
    """Return whether a text may come in one of some places."""
    try:
        return bool(behind(places, text)[0])
    except TooWide:
        return True


# ---------------------------------------------------------------- the shape of calls


class CallShape(Lark):
    """Makes a shape where `Lark` makes a grammar's source: an expression names a part of it.

    What a grammar enforces of a value's characters, a shape lets be. An object whose schema does
    not say that it may have other members has none.
    Owner: the thread that makes it.
    """

    def __init__(self, is_as_templates: bool) -> None:
        """`is_as_templates`: blanks stand where templates write them, and nowhere else."""
        super().__init__({})
        self.line_end = Expression('"\\n"') if is_as_templates else NEWLINE
        self.order = Order()  # of all objects' members: the schemas', until that is changed
        blank = () if is_as_templates else (Choice((Literal(b" "), _EMPTY)),)
        end = b" " if is_as_templates else b""
        self._comma = Row((Literal(b"," + end), *blank))
        self._colon = Row((Literal(b":" + end), *blank))
        self._shapes: dict[str, Shape] = {
            NOTHING: _EMPTY,
            NEWLINE: Choice((Literal(b"\n"), _EMPTY)),
            "/[0-9]{1,2}/": JsonNumber(),
        }
        self._values_left = VALUES_MAX
        self._bytes_left = LITERAL_BYTES_MAX
        self._cpu_s_end = time.thread_time() + CPU_S_MAX

    def shape(self, expression: str) -> Shape:
        """Return what an expression, or a literal text, stands for. Raises KeyError."""
        if not isinstance(expression, Expression):
            return Literal(expression.encode()) if expression else _EMPTY
        if expression.startswith('"') and expression not in self._shapes:
            return self._word(str(json.loads(expression)))
        return self._shapes[expression]

    # ------------------------------------------------------------ what grammars are made of

    def row(self, *parts: str) -> Expression:
        return self._named(_row([self.shape(part) for part in parts]))

    def any_of(self, choices: Iterable[str]) -> Expression:
        return self._named(_choice([self.shape(choice) for choice in choices]))

    def optional(self, *parts: str) -> Expression:
        return self._named(Choice((self.shape(self.row(*parts)), _EMPTY)))

    def repeated(self, *parts: str) -> Expression:
        return self._named(Repeated(self.shape(self.row(*parts))))

    def text_until(self, end: str, characters_max: int | None = None, but: str = "") -> Expression:
        return self._named(TextUntil(end.encode()))

    def json(self, schema: Mapping[str, Any], **options: Any) -> Expression:
        return self._named(self._value(schema, DEPTH_MAX))

    def elements(self, items: Sequence[tuple[str, bool]]) -> Expression:
        return self.separated(items, "")

    def separated(self, items: Sequence[tuple[str, bool]], separator: str) -> Expression:
        members = [Member(self.shape(item), is_required) for item, is_required in items]
        between = self.shape(separator) if separator else None
        return self._named(Members(members, between, self.order))

    def rule(self, body: str, options: str = "") -> Expression:
        return self._named(self.shape(body))

    def _named(self, shape: Shape) -> Expression:
        self._check_time()
        if len(self._shapes) >= RULES_MAX:
            raise RequestError(f"The tools' calls have over {RULES_MAX:,} parts.")
        name = Expression(f"s{len(self._shapes)}")
        self._shapes[name] = shape
        return name

    def _check_time(self) -> None:
        if time.thread_time() > self._cpu_s_end:
            raise RequestError(f"The shape of the tools' calls takes over {CPU_S_MAX} s to make.")

    # ------------------------------------------------------------ values of JSON

    def _value(self, schema: Mapping[str, Any], depth: int) -> Shape:
        """Return a value of a schema, complete in itself, with so much depth in it."""
        self._check_time()
        self._values_left -= 1
        if not depth or self._values_left < 0:
            return _ANY
        part = whole(resolved(schema, schema), schema)
        for key in ("anyOf", "oneOf"):
            if isinstance(part.get(key), list) and part[key] and "properties" not in part:
                if len(part[key]) > MEMBERS_MAX:
                    return _ANY
                return Choice([self._value(whole(each, part), depth - 1) for each in part[key]])
        if "const" in part or isinstance(part.get("enum"), list):
            values = [part["const"]] if "const" in part else part["enum"]
            is_any = any(isinstance(each, dict | list) for each in values)
            if is_any or not 0 < len(values) <= MEMBERS_MAX:
                return _ANY
            # Strings are told apart by what stands in them alone.
            return Choice([self._json_word(each) for each in values])
        kinds = part.get("type", "object" if "properties" in part else None)
        if not isinstance(kinds, list):
            return self._of_type(kinds, part, depth)
        names = dict.fromkeys(kind for kind in kinds if isinstance(kind, str))
        return Choice([self._of_type(name, part, depth) for name in [*names][:MEMBERS_MAX]])

    def _of_type(self, kind: Any, schema: dict[str, Any], depth: int) -> Shape:
        others = schema.get("additionalProperties") or schema.get("patternProperties")
        is_empty = schema.get("additionalProperties") is False
        # An object has the members that its schema names, and no others.
        if kind == "object" and not others and (schema.get("properties") or is_empty):
            return self._object(schema, depth)
        if kind == "array" and isinstance(schema.get("items"), dict):
            item = self._value(whole(schema["items"], schema), depth - 1)
            more = Repeated(Row((self._comma, item)))
            return Row((Literal(b"["), Choice((Row((item, more)), _EMPTY)), Literal(b"]")))
        return _OF_TYPE.get(kind, _ANY) if isinstance(kind, str) else _ANY

    def _object(self, schema: dict[str, Any], depth: int) -> Shape:
        root = resolved(schema, schema)
        listed = [root.get(key) for key in ("properties", "required")]
        if any(isinstance(each, dict | list) and len(each) > MEMBERS_MAX for each in listed):
            return _ANY
        parameters = ToolSchema("", schema).parameters()
        members = [
            Member(
                Row((self._json_word(each.name), self._colon, self._value(each.schema, depth - 1))),
                each.is_required,
            )
            for each in parameters
        ]
        return Row((Literal(b"{"), Members(members, self._comma, self.order), Literal(b"}")))

    def _json_word(self, value: Any) -> Literal:
        return self._word(json.dumps(value, ensure_ascii=False))

    def _word(self, word: str) -> Literal:
        """Return a text of the client's."""
        text = word.encode(errors="replace")
        self._bytes_left -= len(text)
        if self._bytes_left < 0:
            raise RequestError(f"The tools' names and words are over {LITERAL_BYTES_MAX:,} bytes.")
        return Literal(text)


def _row(parts: Iterable[Shape]) -> Shape:
    """Return parts one behind the other; literal ones that stand side by side are one."""
    made: list[Shape] = []
    for part in parts:
        for each in _parts(part):
            if isinstance(each, Literal) and not each.text:
                continue
            if made and isinstance(each, Literal) and isinstance(made[-1], Literal):
                made[-1] = Literal(made[-1].text + each.text)
            else:
                made.append(each)
    return made[0] if len(made) == 1 else Row(made)


def _choice(parts: Sequence[Shape]) -> Shape:
    """Return one of some parts; the literal text that all of them begin with is read once."""
    heads = [_parts(part)[:1] for part in parts]
    literals = [head[0].text for head in heads if head and isinstance(head[0], Literal)]
    begin = common(literals) if len(literals) == len(parts) else b""
    if not begin or len(parts) == 1:
        return Choice(parts)
    rests = [
        _row([Literal(literal[len(begin) :]), *_parts(part)[1:]])
        for literal, part in zip(literals, parts, strict=True)
    ]
    return Row((Literal(begin), Choice(rests)))


def _parts(shape: Shape) -> Sequence[Shape]:
    return shape.parts if isinstance(shape, Row) else (shape,)
