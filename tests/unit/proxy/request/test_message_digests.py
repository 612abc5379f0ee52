"""Checks which changes by a client keep a message's digests, and which change them."""

import copy
from typing import Any
from unittest import mock

import pytest

from hearth.proxy.api.body.tool_definitions import tool_call
from hearth.proxy.request import message_digests
from hearth.proxy.request.message_digests import REMEMBERED_MAX, MessageDigester
from tests.helpers.proxy.volatile_texts import (
    BILLING,
    CONTEXT,
    REMINDER,
    USAGE,
    name_of,
    names_of,
    user,
)


def test_a_message_of_volatile_blocks_alone_leaves_no_trace() -> None:
    first, trailing = names_of(user("Tun cita"), user(CONTEXT))
    assert (trailing.canonical, trailing.rules) == (b"", ["inbound_context"])
    assert first.canonical
    assert name_of(user(f"{REMINDER}\n{REMINDER}\n")).canonical == b""
    assert name_of({"role": "system", "content": BILLING}).canonical == b""


def test_an_empty_message_and_a_result_of_a_reminder_alone_are_still_messages() -> None:
    assert name_of(user("")).canonical
    result = {"role": "tool", "content": REMINDER, "tool_call_id": "c"}
    assert name_of(result).canonical == name_of(result | {"content": ""}).canonical != b""


def assistant(content: str = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def calling(arguments: Any, call_id: str = "call_1") -> dict[str, Any]:
    return assistant(tool_calls=[tool_call(call_id, "price", arguments)])


def test_what_the_model_said_is_recognised_as_clients_echo_it() -> None:
    said = assistant("\n\nTun nut.\n", reasoning_content="why", signatures=["s"])
    echoes = [assistant("Tun nut."), assistant("Tun nut.\n", signatures=["t"])]
    assert {name_of(echo).canonical for echo in echoes} == {name_of(said).canonical}
    assert name_of(said).exact not in {name_of(echo).exact for echo in echoes}
    assert name_of(assistant("Tun  nut.")).canonical != name_of(said).canonical


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_message_is_known_by_its_words_however_they_are_cut(role: str) -> None:
    words = [f"{REMINDER}\nTun", "nut."]
    parts = [{"type": "text", "text": each} for each in words]
    whole, cut = ({"role": role, "content": each} for each in ("\n".join(words), parts))
    assert name_of(cut).canonical == name_of(whole).canonical
    assert name_of(cut).exact != name_of(whole).exact
    image = {"type": "image", "image": "0f"}
    shown, joined = (
        {"role": role, "content": [*each, image]}
        for each in (parts, [{"type": "text", "text": "\n".join(words)}])
    )
    assert name_of(shown).canonical == name_of(joined).canonical


def test_a_call_is_known_by_its_name_and_what_its_arguments_are() -> None:
    call = calling('{"b": [5000.0, {"x": -0.0}], "a": "caf\\u00e9"}')
    echo = calling({"a": "café", "b": [5000, {"x": 0}]}, "call1")
    assert name_of(call).canonical == name_of(echo).canonical
    assert name_of(call).exact != name_of(echo).exact
    for other in ({"a": "café", "b": [5001, {"x": 0}]}, {"a": "café", "b": [True, {"x": 0}]}):
        assert name_of(calling(other)).canonical != name_of(call).canonical
    assert name_of(calling({"n": True})).canonical != name_of(calling({"n": 1})).canonical
    past_doubles = (calling({"n": 2**53 + 1}), calling({"n": 2**53}))
    assert len({name_of(row).canonical for row in past_doubles}) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"role": "system"},
        {"content": "x"},
        {"reasoning_content": "x"},
        {"tool_calls": [tool_call("c", "f", {"b": 1.0, "a": 2})]},
        {"tool_calls": [tool_call("d", "f", {"a": 2, "b": 1.0})]},
        {"tool_calls": [tool_call("c", "f", {"a": 2, "b": 1})]},
        {"tool_call_id": "x"},
        {"name": "x"},
        {"tool_references": ["x"]},
    ],
)
def test_the_exact_digest_tells_everything_that_is_shown_apart(change: dict[str, Any]) -> None:
    message = user("hi") | {"tool_calls": [tool_call("c", "f", {"a": 2, "b": 1.0})]}
    assert name_of(message | change).exact != name_of(message).exact
    assert name_of(message | {"signatures": ["not shown"]}).exact == name_of(message).exact


def test_a_result_is_known_without_the_id_of_its_call() -> None:
    results = [{"role": "tool", "content": "r", "tool_call_id": i} for i in ("call_X", "callX")]
    assert len({name_of(row).canonical for row in results}) == 1
    assert len({name_of(row).exact for row in results}) == 2


def showing(*parts: str, role: str = "user") -> dict[str, Any]:
    """Return a message of texts, and of images where a part begins with a #."""
    content = [
        {"type": "image", "image": part} if part.startswith("#") else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": role, "content": content}


def test_another_image_is_another_message_and_so_is_its_place() -> None:
    rows = [
        *(showing("#1"), showing("#2"), showing("#1", "#1"), showing("#1", "#2")),
        *(showing("#2", "#1"), showing("a", "#1"), showing("#1", "a"), showing("b", "#1")),
        *(showing("#1", role="tool"), user("#1"), user("a"), user("")),
    ]
    named = names_of(*rows)
    assert len({name.exact for name in named}) == len(rows)
    assert len({name.canonical for name in named}) == len(rows)
    assert named == names_of(*copy.deepcopy(rows))


@pytest.mark.parametrize("role", ["user", "tool"])
def test_volatile_fields_beside_an_image_are_left_out_as_without(role: str) -> None:
    plain = name_of(showing("#1", "Tun cita", role=role))
    reminded = name_of(showing(f"{REMINDER}", "#1", f"Tun cita\n{USAGE}", role=role))
    assert reminded.canonical == plain.canonical != b""
    assert reminded.exact != plain.exact
    assert set(reminded.rules) == {"system_reminder", "run_statistics"}
    assert name_of(showing(REMINDER, "#1", role=role)).canonical != b"", "it shows something"


def test_delta_counts_text_alone_beside_an_image_and_nothing_where_it_is_off() -> None:
    rows = [user("Tun cita"), showing("#1" * 999, f"a\n{CONTEXT}", "#2")]
    assert MessageDigester(True, False).names(rows)[1] == len(CONTEXT) + 1
    names, delta = MessageDigester(True, True).names(rows)
    assert delta == 0 and names[1].canonical == names[1].exact
    off, delta = MessageDigester(False, True).names(rows)
    assert delta == 0 and all(name.canonical == name.exact and name.rules == [] for name in off)
    assert [name.exact for name in off] == [name.exact for name in names]


def test_delta_counts_the_characters_that_the_canonical_forms_lack() -> None:
    rows = [user("Tun cita"), assistant(" yes \n"), user(CONTEXT)]
    assert MessageDigester(True, False).names(rows)[1] == len(CONTEXT) + 3
    assert MessageDigester(True, False).names([user("[Sat 2026-11-21 10:03 UTC] x")])[1] == 26 - 5


def test_a_conversation_that_shrinks_by_over_a_tenth_is_known_by_its_exact_text() -> None:
    text = "x" * 9 * len(CONTEXT)
    at_most = [user(text), user(CONTEXT)]
    names, delta = MessageDigester(True, True).names(at_most)
    assert (names[1].canonical, delta) == (b"", len(CONTEXT))
    over = [user(text[:-10]), user(CONTEXT)]
    names, delta = MessageDigester(True, True).names(over)
    assert delta == 0
    assert all(name.canonical == name.exact and name.rules == [] for name in names)
    assert names_of(*over)[1].canonical == b""


def test_what_was_seen_before_is_named_the_same_and_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hearth.proxy.request.message_digests.REMEMBERED_MAX", 3)
    digester = MessageDigester(True, False)
    rows = [user(f"{REMINDER}\n{n}") for n in range(5)]
    assert digester.names(rows) == digester.names(rows)
    assert len(digester._known) == 3
    assert REMEMBERED_MAX > 10_000


def test_a_message_that_another_key_has_sent_is_named_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    named = mock.Mock(wraps=message_digests.canonical_text)
    monkeypatch.setattr(message_digests, "canonical_text", named)
    digester = MessageDigester(True, False)
    rows = [user(f"{n} {REMINDER}\nthe code is {n}") for n in range(3)]
    found = [digester.names(rows, owner) for owner in ("mine", "mine", "theirs")]
    assert named.call_count == 2 * len(rows), "B pays what A paid, and A pays once"
    assert found[0] == found[1] == found[2], "whoever asks, the names are the same"
