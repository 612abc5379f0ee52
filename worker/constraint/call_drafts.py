"""Predicts the tokens that must come next in a call, in answers without an enforced grammar.

The shape of calls is built from each format's description in `call_grammars`. Uses no MLX.
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
from hearth.worker.constraint.json_schemas import ToolSchema, resolved, with_definitions
from hearth.worker.constraint.text_shape import (
    Choice,
    Concat,
    JsonNumber,
    JsonString,
    JsonValue,
    Literal,
    Member,
    Members,
    Order,
    Positions,
    Repeated,
    Shape,
    TextUntil,
    TooManyPositions,
    advance,
    common_prefix,
    forced_text,
    start_positions,
)

log = logging.getLogger(__name__)

TAIL_BYTES: Final = 64  # last bytes of the answer, searched for a mark; all marks are shorter
CALL_BYTES_MAX: Final = 1 << 16  # longest call that is followed; a reread takes milliseconds
CALL_STEPS_MAX: Final = 4_096  # most steps of a call that is read again
FORCED_BYTES_MAX: Final = 128  # most bytes of forced text returned per call
CHARACTER_BYTES_MAX: Final = 4
TEXTS_MAX: Final = 512  # texts with remembered tokens
DEPTH_MAX: Final = 6  # levels of nested values; a deeper value may be any JSON
MEMBERS_MAX: Final = 256  # members of an object, or choices of a value; with more, any JSON fits
VALUES_MAX: Final = 4_000  # values of all tools together; further ones may be any JSON
LITERAL_BYTES_MAX: Final = 2_000_000  # bytes of all names and words, repetitions included
CPU_S_MAX: Final = 1.0  # CPU time to build a shape; a single part can take milliseconds
_ANY: Final = JsonValue()
_STRING: Final = Concat((Literal(b'"'), JsonString()))
_OF_TYPE: Final[Mapping[Any, Shape]] = {
    "string": _STRING,
    "integer": JsonNumber(),
    "number": JsonNumber(),
    "boolean": Choice((Literal(b"true"), Literal(b"false"))),
    "null": Literal(b"null"),
}
_EMPTY: Final = Concat()


class ForcedTexts:
    """Tokenises forced text, and remembers the tokens for one API key.

    Owner: the inference thread.
    """

    def __init__(
        self,
        tokens_of: Callable[[str], Sequence[int]],
        token_bytes: Callable[[int], bytes],
        marks: Container[int],
    ) -> None:
        """`marks` are tokens that never stand for other text."""
        self._tokens_of = tokens_of
        self.token_bytes = token_bytes
        self._marks = marks
        self._tokens: dict[bytes, list[int]] = {}  # token ids of a text

    def forced_tokens(self, positions: Positions) -> list[int]:
        """Return the tokens that must come next.

        The last token of the forced text is left out if a longer token may come in its place.
        Raises TooManyPositions.
        """
        text, positions = forced_text(positions, FORCED_BYTES_MAX)
        if not text:
            return []
        tokens = self._tokens.get(text)
        if tokens is None:
            tokens = self._tokenise(text)
        is_sure = None in positions or (tokens and tokens[-1] in self._marks)
        return tokens if is_sure else tokens[:-1]

    def _tokenise(self, text: bytes) -> list[int]:
        """Return the tokens of a text; remember the tokens of the text and of each rest."""
        if len(self._tokens) >= TEXTS_MAX:
            self._tokens.clear()
        # The text may end within a character.
        tokens = list(self._tokens_of(text.decode(errors="ignore")))
        pieces = [self.token_bytes(token) for token in tokens]
        joined = b"".join(pieces)
        if not text.startswith(joined) or len(text) - len(joined) >= CHARACTER_BYTES_MAX:
            tokens = []
        self._tokens[text] = tokens
        rest = text
        for count, piece in enumerate(pieces if tokens else (), 1):
            rest = rest[len(piece) :]
            self._tokens[rest] = tokens[count:]
        return tokens


class CallDrafts:
    """Follows the calls of one answer in their shape, from the mark that opens each call.

    Invariant: no method raises or waits. A call that leaves its shape has no more forced tokens. A
    call with members in another order than the schema's is followed in any order.
    Owner: the inference thread.
    """

    def __init__(
        self, mark: str, shape: Shape, order: Order, texts: ForcedTexts, counts: Counter[str]
    ) -> None:
        """`mark` begins a call, and `shape` is the shape from the mark on.

        `order` belongs to `shape`, `texts` to the API key of the request. The method `take` adds
        to `counts`.
        """
        assert 0 < len(mark.encode()) < TAIL_BYTES, mark
        self._mark = mark.encode()
        self._shape = shape
        self._order = order
        self._token_bytes = texts.token_bytes
        self._texts = texts
        self._counts = counts
        self._tail = b""  # the last bytes outside of a followed call
        self._written = bytearray()  # the bytes of the call
        self.positions: Positions = ()  # positions of the followed call; empty without a call
        self._after_end: bytes | None = None  # the bytes after a possible end of the call
        self._is_over = False

    def take(self, tokens: Sequence[int]) -> None:
        """Follow the answer's next tokens."""
        for token in tokens:
            if not self._is_over:
                self._take(self._token_bytes(token))

    def forced(self, tokens_max: int) -> list[int]:
        """Return tokens that very likely come next; none if that is not known."""
        assert tokens_max >= 0, tokens_max
        try:
            return self._texts.forced_tokens(self.positions)[:tokens_max]
        except TooManyPositions:
            return []

    def fitting(self, ahead: Sequence[int], tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Return how many of `tokens` may come after `ahead`, and the tokens forced after them.

        The count ends at the first token after which tokens are forced, and at the end of a call:
        most answers end with the call, and the end of an answer is not worth a draft.
        """
        if not self.positions:
            return len(tokens), []
        try:
            positions = self._positions_after(ahead)
            for count, token in enumerate(tokens):
                positions, _ = advance(positions, self._token_bytes(token))
                if not positions:
                    return count, []
                if found := self._texts.forced_tokens(positions):
                    return count + 1, found
        except TooManyPositions:
            pass
        return len(tokens), []

    def choice(self, ahead: Sequence[int]) -> Callable[[int], bool] | None:
        """Return a test of whether a token may come after `ahead`.

        Return None unless one of a few literal texts must come.
        """
        try:
            positions = self._positions_after(ahead)
        except TooManyPositions:
            return None
        texts = sorted(
            position.shape.text[position.state :]
            for position in positions
            if position and isinstance(position.shape, Literal)
        )
        if not texts or len(texts) < len(positions):
            return None
        whole = tuple(texts)

        def may_come(token: int) -> bool:
            text = self._token_bytes(token)
            index = bisect_left(texts, text)  # index of the first text that may begin with `text`
            if index < len(texts) and texts[index].startswith(text):
                return True
            return text.startswith(whole) and _may_follow(positions, text)

        return may_come

    def _positions_after(self, ahead: Sequence[int]) -> Positions:
        text = b"".join(map(self._token_bytes, ahead))
        return advance(self.positions, text)[0] if text else self.positions

    def _take(self, text: bytes) -> None:
        """Follow `text`; the text after a call may open the next call."""
        try:
            rest: bytes | None = text
            while rest and not self._is_over:
                rest = self._read(rest) if self.positions else self._find_mark(rest)
        except TooManyPositions:
            self._clear()
        except Exception:
            log.exception("drafting a call broke")
            self._counts["call_drafts_ended"] += 1
            self._is_over = True
            self._clear()

    def _find_mark(self, text: bytes) -> bytes | None:
        """Return the text from the mark of a call on; None without a mark."""
        before, mark, after = (self._tail + text).partition(self._mark)
        if not mark:
            self._tail = before[-TAIL_BYTES:]
            return None
        self._tail = b""
        self.positions = start_positions(self._shape)
        return mark + after

    # ------------------------------------------------------------ a call

    def _read(self, text: bytes) -> bytes | None:
        """Read on in a call; return text that may open another call, None if the call goes on."""
        positions, left = advance(self.positions, text)
        if not positions and not left and self._after_end is None and self._order.is_kept:
            positions, left = self._reread_in_any_order(text)
        if positions:
            self.positions = positions
            self._written += text
            self._check_end(text)
            return None
        rest = text if self._written else None  # text of a call that leaves its shape
        if left or self._after_end is not None:
            rest = text[len(text) - left :] if left else (self._after_end or b"") + text
        self._clear()
        return rest

    def _reread_in_any_order(self, text: bytes) -> tuple[Positions, int]:
        """Read the call again with members in any order.

        If it fits, the next calls are read in any order, too; otherwise in the schema's order.
        """
        self._order.is_kept = False
        positions: Positions = ()
        try:
            written = bytes(self._written) + text
            positions, left = advance(start_positions(self._shape), written, CALL_STEPS_MAX)
        finally:
            self._order.is_kept = not positions
        return positions, left

    def _check_end(self, text: bytes) -> None:
        """Remember whether the call may have ended here, and stop at its certain end."""
        if self.positions == (None,):
            self._clear()
        elif None in self.positions:
            self._after_end = b""
        elif self._after_end is not None:
            is_near = len(self._after_end) + len(text) < TAIL_BYTES
            self._after_end = self._after_end + text if is_near else None
        if len(self._written) > CALL_BYTES_MAX:
            self._clear()

    def _clear(self) -> None:
        """Stop following this call; another call may begin."""
        self.positions, self._after_end = (), None
        self._written.clear()


def _may_follow(positions: Positions, text: bytes) -> bool:
    """Return whether a text may come at one of the positions."""
    try:
        return bool(advance(positions, text)[0])
    except TooManyPositions:
        return True


# ---------------------------------------------------------------- the shape of calls


class CallShape(Lark):
    """Makes a shape as `Lark` makes a grammar: each expression names a part of the shape.

    Unlike a grammar, a shape does not check the characters of values. An object has other members
    than the schema's only if the schema says so.
    Owner: the thread that makes it.
    """

    def __init__(self, is_as_templates: bool) -> None:
        """`is_as_templates`: blanks stand only where templates write them."""
        super().__init__({})
        self.line_end = Expression('"\\n"') if is_as_templates else NEWLINE
        self.order = Order()  # whether members of objects come in the schema's order
        blank = () if is_as_templates else (Choice((Literal(b" "), _EMPTY)),)
        end = b" " if is_as_templates else b""
        self._comma = Concat((Literal(b"," + end), *blank))
        self._colon = Concat((Literal(b":" + end), *blank))
        self._shapes: dict[str, Shape] = {
            NOTHING: _EMPTY,
            NEWLINE: Choice((Literal(b"\n"), _EMPTY)),
            "/[0-9]{1,2}/": JsonNumber(),
        }
        self._values_left = VALUES_MAX
        self._bytes_left = LITERAL_BYTES_MAX
        self._cpu_s_end = time.thread_time() + CPU_S_MAX

    def shape(self, expression: str) -> Shape:
        """Return the part that an expression or a literal text stands for. Raises KeyError."""
        if not isinstance(expression, Expression):
            return Literal(expression.encode()) if expression else _EMPTY
        if expression.startswith('"') and expression not in self._shapes:
            return self._word(str(json.loads(expression)))
        return self._shapes[expression]

    # ------------------------------------------------------------ the operations of Lark

    def concat(self, *parts: str) -> Expression:
        return self._named(_concat([self.shape(part) for part in parts]))

    def any_of(self, choices: Iterable[str]) -> Expression:
        return self._named(_choice([self.shape(choice) for choice in choices]))

    def optional(self, *parts: str) -> Expression:
        return self._named(Choice((self.shape(self.concat(*parts)), _EMPTY)))

    def repeated(self, *parts: str) -> Expression:
        return self._named(Repeated(self.shape(self.concat(*parts))))

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
        """Return the shape of a value; `schema` has all definitions, `depth` is the levels left."""
        self._check_time()
        self._values_left -= 1
        if not depth or self._values_left < 0:
            return _ANY
        part = with_definitions(resolved(schema, schema), schema)
        for key in ("anyOf", "oneOf"):
            if isinstance(part.get(key), list) and part[key] and "properties" not in part:
                if len(part[key]) > MEMBERS_MAX:
                    return _ANY
                return Choice(
                    [self._value(with_definitions(item, part), depth - 1) for item in part[key]]
                )
        if "const" in part or isinstance(part.get("enum"), list):
            values = [part["const"]] if "const" in part else part["enum"]
            is_any = any(isinstance(value, dict | list) for value in values)
            if is_any or not 0 < len(values) <= MEMBERS_MAX:
                return _ANY
            return Choice([self._json_word(value) for value in values])
        kinds = part.get("type", "object" if "properties" in part else None)
        if not isinstance(kinds, list):
            return self._of_type(kinds, part, depth)
        names = dict.fromkeys(kind for kind in kinds if isinstance(kind, str))
        return Choice([self._of_type(name, part, depth) for name in [*names][:MEMBERS_MAX]])

    def _of_type(self, kind: Any, schema: dict[str, Any], depth: int) -> Shape:
        others = schema.get("additionalProperties") or schema.get("patternProperties")
        is_empty = schema.get("additionalProperties") is False
        # The object has only the members that its schema names.
        if kind == "object" and not others and (schema.get("properties") or is_empty):
            return self._object(schema, depth)
        if kind == "array" and isinstance(schema.get("items"), dict):
            item = self._value(with_definitions(schema["items"], schema), depth - 1)
            more = Repeated(Concat((self._comma, item)))
            return Concat((Literal(b"["), Choice((Concat((item, more)), _EMPTY)), Literal(b"]")))
        return _OF_TYPE.get(kind, _ANY) if isinstance(kind, str) else _ANY

    def _object(self, schema: dict[str, Any], depth: int) -> Shape:
        root = resolved(schema, schema)
        listed = [root.get(key) for key in ("properties", "required")]
        if any(isinstance(names, dict | list) and len(names) > MEMBERS_MAX for names in listed):
            return _ANY
        parameters = ToolSchema("", schema).parameters()
        members = [
            Member(
                Concat(
                    (self._json_word(item.name), self._colon, self._value(item.schema, depth - 1))
                ),
                item.is_required,
            )
            for item in parameters
        ]
        return Concat((Literal(b"{"), Members(members, self._comma, self.order), Literal(b"}")))

    def _json_word(self, value: Any) -> Literal:
        return self._word(json.dumps(value, ensure_ascii=False))

    def _word(self, word: str) -> Literal:
        """Return a literal with a client's text."""
        text = word.encode(errors="replace")
        self._bytes_left -= len(text)
        if self._bytes_left < 0:
            raise RequestError(f"The tools' names and words are over {LITERAL_BYTES_MAX:,} bytes.")
        return Literal(text)


def _concat(parts: Iterable[Shape]) -> Shape:
    """Return the parts one after another; neighbouring literals become one literal."""
    joined: list[Shape] = []
    for part in parts:
        for piece in _parts(part):
            if isinstance(piece, Literal) and not piece.text:
                continue
            if joined and isinstance(piece, Literal) and isinstance(joined[-1], Literal):
                joined[-1] = Literal(joined[-1].text + piece.text)
            else:
                joined.append(piece)
    return joined[0] if len(joined) == 1 else Concat(joined)


def _choice(parts: Sequence[Shape]) -> Shape:
    """Return a choice of parts; the literal text that begins all of them is read once."""
    heads = [_parts(part)[:1] for part in parts]
    literals = [head[0].text for head in heads if head and isinstance(head[0], Literal)]
    prefix = common_prefix(literals) if len(literals) == len(parts) else b""
    if not prefix or len(parts) == 1:
        return Choice(parts)
    rests = [
        _concat([Literal(literal[len(prefix) :]), *_parts(part)[1:]])
        for literal, part in zip(literals, parts, strict=True)
    ]
    return Concat((Literal(prefix), Choice(rests)))


def _parts(shape: Shape) -> Sequence[Shape]:
    return shape.parts if isinstance(shape, Concat) else (shape,)
