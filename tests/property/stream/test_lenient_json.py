"""Valid JSON stays what it is, and no text is too odd to become JSON."""

import json
from typing import Any

from hypothesis import given, settings, strategies as st

from tests.helpers.worker.transcoded_json import transcoded

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.sampled_from(['"', '", "b": 1', "'}", '"}]', "\\", "</tool_call>\n", ", ", '": "', "'''"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.text(), st.just("k" * 200)), inner, max_size=4),
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=5)
STYLES = st.sampled_from(
    [{}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (",", ":")}, {"indent": "\t"}]
)
SIZES = st.integers(1, 30)


def spelled(text: str) -> Any:
    """Return what JSON says, with its numbers as they are spelled."""
    return json.loads(text, parse_int=lambda n: ("int", n), parse_float=lambda n: ("float", n))


@given(value=OBJECTS, style=STYLES, size=SIZES)
@settings(max_examples=150)
def test_valid_json_keeps_its_values_and_the_spelling_of_its_numbers(
    value: dict[str, Any], style: dict[str, Any], size: int
) -> None:
    text = json.dumps(value, **style)
    assert spelled(transcoded(text, size=size)) == spelled(text)
    assert transcoded(text, is_complete=False, size=size) == transcoded(text, size=len(text))


PIECES = st.sampled_from(
    [
        *"{}[]\":,'\\/ \n\t",
        '"a"',
        '"a": ',
        "true",
        "None",
        "1",
        ".5",
        "-",
        "\\u",
        "00e9",
        "x",
        '"""',
    ]
)


@given(text=st.one_of(st.lists(PIECES, max_size=30).map("".join), st.text()), size=SIZES)
@settings(max_examples=150)
def test_any_text_becomes_json_or_nothing_however_it_is_cut(text: str, size: int) -> None:
    whole = transcoded(text, size=len(text) + 1)
    assert transcoded(text, size=size) == whole
    assert not whole or json.loads(whole) is not Ellipsis


@given(value=OBJECTS, data=st.data())
@settings(max_examples=200)
def test_an_object_that_was_cut_off_is_no_json(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value)
    cut = transcoded(text[: data.draw(st.integers(0, len(text) - 1))], is_complete=False)
    assert transcoded(text).startswith(cut)
    assert not cut or not is_json(cut)


def test_a_key_that_ends_like_a_loose_one_is_not_taken_for_it_where_it_is_cut() -> None:
    text = json.dumps({"=": None, "a=": "b", "c": {"=": 1}})
    whole = transcoded(text)
    for end in range(len(text)):
        assert whole.startswith(transcoded(text[:end], is_complete=False)), text[:end]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
