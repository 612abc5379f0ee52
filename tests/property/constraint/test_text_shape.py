"""Text of a known shape is followed to its end however it is cut, and no wrong text is forced."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.worker.constraint.call_drafts import CallShape
from hearth.worker.constraint.text_shape import (
    Concat,
    JsonString,
    JsonValue,
    Literal,
    Positions,
    Repeated,
    Shape,
    TextUntil,
    advance,
    forced_text,
    start_positions,
)

VALUES: dict[str, Any] = {
    "path": "a\\b",
    "days": -7.5,
    "is_deep": True,
    "unit": "celsius",
    "lines": [1, 2],
    'q"ü': None,
}
SCHEMAS: dict[str, Any] = {
    "path": {"type": "string"},
    "days": {"type": "number"},
    "is_deep": {"type": "boolean"},
    "unit": {"enum": ["celsius", "fahrenheit"]},
    "lines": {"type": "array", "items": {"type": "integer"}},
    'q"ü': {"type": ["string", "null"]},
}
NAMES = st.sampled_from(sorted(SCHEMAS))
CUTS = st.lists(st.integers(0, 200), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def shape_of(schema: dict[str, Any], is_in_order: bool) -> Shape:
    made = CallShape(is_as_templates=True)
    made.order.is_kept = is_in_order
    return made.shape(made.json(schema))


def schema_of(required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": SCHEMAS, "required": required}


def written(names: list[str]) -> bytes:
    pairs = (f"{json.dumps(n, ensure_ascii=False)}: {json.dumps(VALUES[n])}" for n in names)
    return ("{" + ", ".join(pairs) + "}").encode()


def pieces(text: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


def followed(shape: Shape, text: bytes, cuts: list[int]) -> Positions:
    """Return where a text is; fail where other text was forced than came."""
    places, rest = start_positions(shape), text
    for piece in pieces(text, cuts):
        must, _ = forced_text(places, 64)
        assert rest.startswith(must) or must.startswith(rest) or not advance(places, rest)[0]
        places, _ = advance(places, piece)
        rest = rest[len(piece) :]
    return places


@given(
    required=st.lists(NAMES, unique=True),
    names=st.lists(NAMES, max_size=len(SCHEMAS) + 1),
    cuts=CUTS,
    is_in_order=st.booleans(),
)
def test_an_object_holds_each_member_once_and_lacks_no_required_one(
    required: list[str], names: list[str], cuts: list[int], is_in_order: bool
) -> None:
    is_right = len(set(names)) == len(names) and set(required) <= set(names)
    is_in_its_order = sorted(names, key=list(SCHEMAS).index) == names
    places = followed(shape_of(schema_of(required), is_in_order), written(names), cuts)
    assert (places == (None,)) == (is_right and (is_in_its_order or not is_in_order))


@given(order=st.permutations(list(SCHEMAS)), outer=st.permutations(["one", "many"]), cuts=CUTS)
def test_objects_within_objects_and_arrays_hold_their_members_in_any_order_too(
    order: list[str], outer: list[str], cuts: list[int]
) -> None:
    part = {"$ref": "#/$defs/part"}
    properties = {"one": part, "many": {"type": "array", "items": part}}
    schema = {"type": "object", "properties": properties}
    schema["$defs"] = {"part": schema_of(list(SCHEMAS))}
    one = written(order)
    values = {"one": one, "many": b"[%s, %s]" % (one, one)}
    text = b"{" + b", ".join(b'"%s": %s' % (name.encode(), values[name]) for name in outer) + b"}"
    shape = shape_of(schema, is_in_order=False)
    assert followed(shape, text, cuts) == (None,)
    assert followed(shape, text.replace(one, b"{}", 1), cuts) != (None,)


@given(value=JSON, is_ascii=st.booleans(), cuts=CUTS)
def test_any_value_of_json_ends_where_it_ends(value: Any, is_ascii: bool, cuts: list[int]) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode(errors="replace")
    shape = Concat((JsonValue(), Literal(b"}!")))
    places = followed(shape, text + b"}", cuts)
    assert [forced_text((place,), 9)[0] for place in places] == [b"!"]


@given(value=st.text() | st.text('a"\\\n'), cuts=CUTS)
def test_a_string_of_json_ends_at_the_quote_that_nothing_escapes(
    value: str, cuts: list[int]
) -> None:
    text = json.dumps(value)[1:].encode()
    assert followed(JsonString(), text, cuts) == (None,)
    assert None not in followed(JsonString(), text[:-1], cuts)


@given(text=st.text("ab<"), end=st.text("ab<", min_size=1, max_size=4), cuts=CUTS)
def test_free_text_ends_behind_the_first_of_its_marks(text: str, end: str, cuts: list[int]) -> None:
    shape = Concat((TextUntil(end.encode()), Literal(b".")))
    whole = text[: text.find(end) + len(end)] if end in text else text
    places = followed(shape, whole.encode(), cuts)
    assert forced_text(places, 9)[0] == (b"." if end in text else b"")


@pytest.mark.parametrize(
    "more", [{"additionalProperties": True}, {"patternProperties": {"^x": {}}}]
)
def test_objects_that_may_hold_other_members_may_hold_any(more: dict[str, Any]) -> None:
    shape = shape_of(schema_of(["path"]) | more, is_in_order=True)
    assert followed(shape, b'{"other": [{"path": 1}]}', []) == (None,)


def test_what_came_behind_the_end_is_told_where_the_text_cannot_go_on() -> None:
    places = start_positions(Concat((Literal(b"a"), Repeated(Literal(b"b")))))
    assert advance(places, b"ab") == (advance(places, b"abb")[0], 0), "it may go on"
    assert advance(places, b"abxy") == ((), 2)
    assert advance(places, b"x") == ((), 0)
