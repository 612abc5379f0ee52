"""A turn is found by what a client sends back, within one API key, until it is dropped."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.worker.cache.block_hash import pack
from hearth.worker.sessions.echoed_turn_match import TurnContent, turn_content
from hearth.worker.sessions.turn_store import (
    ThinkingStore,
    Turn,
    TurnStore,
    lookup_by_link,
    lookups_by_ids,
    thinking_key,
)
from tests.helpers.held_bytes import held_bytes

KEY, OTHER_KEY = "key-a", "key-b"
PLACE = b"behind the question"


def turn(
    number: int = 0,
    key: str = KEY,
    place: bytes = PLACE,
    call_ids: tuple[str, ...] = (),
    signature: str = "",
    size: int = 4,
) -> Turn:
    said = TurnContent("", f"answer {number}", ())
    return Turn(key, place, pack([number] * size), said, said.content, call_ids, signature)


def echo(*call_ids: str, signatures: Sequence[str] = ()) -> dict[str, Any]:
    calls = [{"id": call_id, "function": {"name": "f", "arguments": {}}} for call_id in call_ids]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": calls,
        "signatures": list(signatures),
    }


def filled(*turns: Turn, **limits: int) -> TurnStore:
    store = TurnStore(**limits)
    for each in turns:
        store.add(each)
    return store


def by_ids(store: TurnStore, key: str, message: dict[str, Any]) -> Sequence[Turn]:
    return store.find(lookups_by_ids(key, message))


def by_place(store: TurnStore, key: str, place: bytes) -> Sequence[Turn]:
    return store.find([lookup_by_link(key, place)])


@pytest.mark.parametrize("letter", ["a", "火", "🔥"])
@pytest.mark.parametrize("size", [3, 1_000])
@pytest.mark.parametrize("calls", [0, 4])
def test_turns_hold_no_more_memory_than_is_counted(letter: str, size: int, calls: int) -> None:
    """The store is bounded by its bytes, so what it does not count is bounded by nothing."""
    store, count = TurnStore(), 100

    def fill() -> None:
        for number in range(count):
            text = f"{number} {letter * size}"
            content = {"content": f"{letter * size}"}
            said = TurnContent(
                text, text + ".", tuple(("write", dict(content)) for _ in range(calls))
            )
            raw = said.reasoning + said.content + json.dumps(content, ensure_ascii=False) * calls
            ids = tuple(f"call_{number}_{call}_{letter!r:.4}" for call in range(calls))
            place = number.to_bytes(16)
            store.add(
                Turn(KEY, place, pack([number] * size), said, raw, ids, f"signature {number}")
            )

    held = held_bytes(fill)
    assert len(store) == count
    assert held <= store.nbytes, (held / count, store.nbytes / count)


@pytest.mark.parametrize("sent", ["call_Ab1", "callAb1", "call-Ab1", "_call_Ab1_"])
def test_a_turn_is_found_by_an_id_that_a_client_stripped(sent: str) -> None:
    known = turn(call_ids=("call_Ab1",))
    assert by_ids(filled(known), KEY, echo(sent)) == [known]


def test_a_turn_of_several_calls_is_found_by_any_of_them_and_once() -> None:
    known = turn(call_ids=("one", "two"))
    store = filled(known)
    assert by_ids(store, KEY, echo("two")) == [known]
    assert by_ids(store, KEY, echo("two", "one")) == [known]


def test_a_turn_is_found_by_the_signature_of_its_thinking() -> None:
    known = turn(signature="sIg_9")
    store = filled(known)
    assert by_ids(store, KEY, echo(signatures=["another", "sIg_9"])) == [known]
    assert by_ids(store, KEY, echo(signatures=["sIg9"])) == []


def test_an_id_is_no_signature_and_a_signature_no_id() -> None:
    store = filled(turn(1, call_ids=("aaa",)), turn(2, signature="bbb"))
    assert by_ids(store, KEY, echo("bbb", signatures=["aaa"])) == []


def test_all_turns_at_a_place_are_found_there_and_none_elsewhere() -> None:
    here, too, there = turn(1), turn(2), turn(3, place=b"elsewhere")
    store = filled(here, too, there)
    assert by_place(store, KEY, PLACE) == [here, too]
    assert by_place(store, KEY, b"elsewhere") == [there]
    assert by_place(store, KEY, b"nowhere") == []


def test_two_api_keys_never_meet() -> None:
    store = filled(turn(call_ids=("one",), signature="sig"))
    assert by_ids(store, OTHER_KEY, echo("one", signatures=["sig"])) == []
    assert by_place(store, OTHER_KEY, PLACE) == []
    mine = turn(7, key=OTHER_KEY, call_ids=("one",), signature="sig")
    store.add(mine)
    assert by_ids(store, OTHER_KEY, echo("one", signatures=["sig"])) == [mine]
    assert mine not in by_place(store, KEY, PLACE)


def test_the_same_turn_twice_is_one_and_a_use_of_it() -> None:
    first, second, third = (turn(n) for n in range(3))
    store = filled(first, second, turn(0), turns_max=2)
    assert len(store) == 2 and store.nbytes == first.nbytes + second.nbytes
    store.add(third)
    assert by_place(store, KEY, PLACE) == [first, third]


def test_the_same_tokens_are_two_turns_where_they_were_given_by_other_ids() -> None:
    """Each client echoes the id or the signature that it was given itself."""
    calls = [turn(1, call_ids=("one",)), turn(1, call_ids=("two",))]
    thoughts = [turn(2, signature="sig1"), turn(2, signature="sig2")]
    store = filled(*calls, *thoughts)
    assert [by_ids(store, KEY, echo(each.call_ids[0])) for each in calls] == [
        [calls[0]],
        [calls[1]],
    ]
    found = [by_ids(store, KEY, echo(signatures=[each.signature])) for each in thoughts]
    assert found == [[thoughts[0]], [thoughts[1]]]


def test_the_turn_that_was_not_used_longest_goes_first() -> None:
    turns = [turn(n, place=b"%d" % n, call_ids=(f"id{n}",), signature=f"s{n}") for n in range(4)]
    store = filled(*turns[:3], turns_max=3)
    assert by_place(store, KEY, b"0") and by_ids(store, KEY, echo("id1"))  # so 2 goes, not 0
    store.add(turns[3])
    assert [bool(by_place(store, KEY, b"%d" % n)) for n in range(4)] == [True, True, False, True]


def test_bytes_are_counted_and_bounded() -> None:
    turns = [turn(n, place=b"%d" % n, size=1_000) for n in range(5)]
    each = turns[0].nbytes
    assert each >= 4_000, "its ids alone are four bytes each"
    store = filled(*turns, bytes_max=3 * each + 1)
    assert len(store) == 3 and store.nbytes == 3 * each
    assert not by_place(store, KEY, b"1") and by_place(store, KEY, b"2")


def test_a_turn_larger_than_all_room_is_not_kept() -> None:
    store = filled(turn(size=1_000), bytes_max=1_000)
    assert (len(store), store.nbytes) == (0, 0)
    assert by_place(store, KEY, PLACE) == []


def test_nothing_is_listed_that_was_dropped() -> None:
    turns = [
        turn(n, place=b"%d" % (n % 3), call_ids=(f"id{n}", f"also{n}"), signature=f"s{n}")
        for n in range(20)
    ]
    store = filled(*turns, turns_max=5)
    assert list(store) == turns[15:]
    store.check()
    assert by_ids(store, KEY, echo("id3", "also4", signatures=["s5"])) == []


# ---------------------------------------------------------------- thinking
# Stripped thinking comes back to the same words of the same conversation, and to no other.

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
    assert len(store.items()) == 3
    store.put(b"long", "x" * 101)
    assert len(store.items()) == 0, "one that is over the limit alone is not kept either"
    store.put(b"short", "x" * 100)
    assert store.get(b"short") == "x" * 100


def test_two_thousand_thoughts_are_remembered() -> None:
    store = ThinkingStore()
    for number in range(2_500):
        store.put(b"%d" % number, "x")
    assert len(store.items()) == 2_000 and store.get(b"499") == "" and store.get(b"500") == "x"
