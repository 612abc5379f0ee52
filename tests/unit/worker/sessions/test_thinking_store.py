"""Stripped thinking comes back to the same words of the same conversation, and to no other."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.worker.sessions.echoed_turn_match import TurnContent, turn_content
from hearth.worker.sessions.turn_store import ThinkingStore, thinking_key

PLACE = b"behind the question"
CALL = ("read", {"path": "/a", "limit": 5000.0, "rows": [1.0, {"deep": 2.0}]})
SAID = TurnContent("", "Let me check.", (CALL,))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def name(content: str = "Let me check.", *calls: tuple[str, Any]) -> bytes:
    return thinking_key("key", PLACE, TurnContent("", content, calls or (CALL,)))


def test_key_place_content_and_calls_each_set_a_turn_apart() -> None:
    names = [
        thinking_key("key", PLACE, SAID),
        thinking_key("another key", PLACE, SAID),
        thinking_key("key", b"elsewhere", SAID),
        name("Let me see."),
        name("Let me check.", ("write", CALL[1])),
        name("Let me check.", ("read", {**CALL[1], "limit": 5001})),
        name("Let me check.", ("read", {**CALL[1], "rows": [1.0, {"deep": "2"}]})),
        name("Let me check.", CALL, CALL),
        thinking_key("key", PLACE, TurnContent("", "Let me check.", ())),
        thinking_key("keyb", PLACE[1:], SAID),
    ]
    assert len(set(names)) == len(names)


def test_thinking_is_no_part_of_what_it_is_found_by() -> None:
    assert thinking_key("key", PLACE, TurnContent("why", SAID.content, SAID.calls)) == name()


@pytest.mark.parametrize(
    "arguments",
    [
        {"path": "/a", "limit": 5000, "rows": [1.0, {"deep": 2.0}]},
        {"path": "/a", "limit": 5000.0, "rows": [1, {"deep": 2}]},
        {"rows": [1.0, {"deep": 2.0}], "limit": 5000.0, "path": "/a"},
        '{"rows": [1, {"deep": 2.0}], "path": "\\u002fa", "limit": 5e3}',
    ],
    ids=["integer", "nested integers", "key order", "text"],
)
def test_arguments_are_known_by_what_they_mean(arguments: Any) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "read", "arguments": arguments}}
    said = turn_content(
        {"role": "assistant", "content": "\n Let me check.\n", "tool_calls": [call]}
    )
    assert thinking_key("key", PLACE, said) == name()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": "1"}),
        ({"a": 1.5}, {"a": 1}),
        ({"a": None}, {}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": [[1], 2]}, {"a": [[1, 2]]}),
        ({"a": {"b": 1}}, {"a": {}, "b": 1}),
        ({"a": ["b", 1]}, {"a": {"b": 1}}),
        ({"a": float(2**60)}, {"a": 2**60}),
    ],
)
def test_values_that_mean_something_else_are_told_apart(one: Any, other: Any) -> None:
    assert name("", ("f", one)) != name("", ("f", other))


@given(JSON, JSON)
def test_equal_names_are_of_equal_arguments(one: Any, other: Any) -> None:
    def plain(value: Any) -> str:
        whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        if isinstance(value, dict):
            return "{" + ",".join(f"{key!r}:{plain(value[key])}" for key in sorted(value)) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(plain, value)) + "]"
        return repr(int(value) if whole else value)

    is_same = name("", ("f", one)) == name("", ("f", other))
    assert is_same == (plain(one) == plain(other))


def test_arguments_nested_as_deep_as_any_text_can_be_have_a_name() -> None:
    """They come from clients as text: no depth of them may end the prompt thread."""
    text = '{"a":' * 900 + "1" + "}" * 900
    call = {"function": {"name": "f", "arguments": text}}
    said = turn_content({"role": "assistant", "content": "", "tool_calls": [call]})
    assert said.calls[0][1] != text, "it was read"
    assert len(thinking_key("key", PLACE, said)) == 16


def test_of_two_thoughts_for_the_same_words_the_later_is_remembered() -> None:
    store = ThinkingStore(chars_max=10)
    for thought in ("earlier", "later"):
        store.put(b"one", thought)
    store.put(b"two", "12345")  # fits: the earlier one's characters are not counted any more
    assert (store.get(b"one"), store.get(b"two")) == ("later", "12345")


def test_entries_are_bounded_by_use() -> None:
    store = ThinkingStore(entries_max=3)
    for number in range(3):
        store.put(b"%d" % number, f"thought {number}")
    store.get(b"0")
    store.put(b"2", "again")
    store.put(b"3", "new")
    assert [store.get(b"%d" % n) for n in range(4)] == ["thought 0", "", "again", "new"]


def test_characters_are_bounded_and_counted() -> None:
    store = ThinkingStore(chars_max=100)
    for number in range(50):
        store.put(b"%d" % number, "x" * 30)
    assert len(store) == 3
    store.put(b"long", "x" * 101)
    assert len(store) == 0, "one that is over the limit alone is not kept either"
    store.put(b"short", "x" * 100)
    assert store.get(b"short") == "x" * 100


def test_two_thousand_thoughts_are_remembered() -> None:
    store = ThinkingStore()
    for number in range(2_500):
        store.put(b"%d" % number, "x")
    assert len(store) == 2_000 and store.get(b"499") == "" and store.get(b"500") == "x"
