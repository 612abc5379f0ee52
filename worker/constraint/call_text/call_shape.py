"""Makes the shape of calls of the grammars' own descriptions of each format (`call_grammars`)."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from hearth.shared.errors import RequestError
from hearth.worker.constraint.call_text.text_shape import (
    Choice,
    JsonNumber,
    JsonString,
    JsonValue,
    Literal,
    Member,
    Members,
    Order,
    Repeated,
    Row,
    Shape,
    TextUntil,
    common,
)
from hearth.worker.constraint.json_schemas import ToolSchema, resolved, whole
from hearth.worker.constraint.lark_builder import NEWLINE, NOTHING, RULES_MAX, Expression, Lark

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
            return self._choice_of([part["const"]] if "const" in part else part["enum"])
        kinds = part.get("type", "object" if "properties" in part else None)
        if not isinstance(kinds, list):
            return self._of_type(kinds, part, depth)
        names = dict.fromkeys(kind for kind in kinds if isinstance(kind, str))
        return Choice([self._of_type(name, part, depth) for name in [*names][:MEMBERS_MAX]])

    def _of_type(self, kind: Any, schema: dict[str, Any], depth: int) -> Shape:
        if kind == "object" and _has_named_members(schema):
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

    def _choice_of(self, values: list[Any]) -> Shape:
        """Return one of some values. Strings are told apart by what stands in them alone."""
        is_any = any(isinstance(each, dict | list) for each in values)
        if is_any or not 0 < len(values) <= MEMBERS_MAX:
            return _ANY
        return Choice([self._json_word(each) for each in values])

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


def _has_named_members(schema: Mapping[str, Any]) -> bool:
    """Return whether an object has the members that its schema names, and no others."""
    may_have_others = schema.get("additionalProperties") or schema.get("patternProperties")
    is_empty = schema.get("additionalProperties") is False
    return not may_have_others and bool(schema.get("properties") or is_empty)
