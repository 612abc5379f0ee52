"""Keys: guessing one by one's watch, and what is remembered of one key before another's eyes."""

import asyncio
import hmac
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.http import api_keys
from hearth.proxy.http.api_keys import SENT_MAX, ApiKeyCheck
from hearth.proxy.request.session_id import api_key_digest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Speaker
from hearth.worker.sessions.session_context import KEPT, RENDERED
from tests.helpers.proxy.proxy_app import app_of, ask
from tests.helpers.worker.session_prompts import QUESTION, SAID, Desk, echo

MINE, THEIRS = Speaker("mine", "s1"), Speaker("theirs", "s1")
KEYS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)


def passes(check: ApiKeyCheck, *headers: tuple[bytes, bytes]) -> str | None:
    try:
        return asyncio.run(check.identity(headers))
    except RequestError as error:
        assert error.status == 401
        return None


@given(st.lists(KEYS, min_size=1, max_size=4), KEYS)
def test_a_key_is_accepted_where_it_is_one_of_those_set_and_nowhere_else(
    keys: list[str], sent: str
) -> None:
    check = ApiKeyCheck([*keys, "one more"])
    for key in keys:
        for header in (
            *((b"x-api-key", key.encode()), (b"authorization", b"Bearer " + key.encode())),
            (b"authorization", b"bearer  " + key.encode() + b" "),
        ):
            assert passes(check, header) == key
        for scheme in (b"", b"Basic "):
            assert passes(check, (b"authorization", scheme + key.encode())) is None
    assert passes(check) is None
    assert asyncio.run(ApiKeyCheck(()).identity([])) is None
    assert passes(check, (b"x-api-key", sent.encode())) == (sent if sent in keys else None)


def test_guessing_by_time_every_key_is_compared_as_a_digest_of_one_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def spy(one: bytes, other: bytes) -> bool:
        lengths.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(api_keys.hmac, "compare_digest", spy)
    check = ApiKeyCheck(["first", "second", "a much longer third key"])
    for sent in (b"first", b"", b"f", b"x" * 5_000, "schlüssel".encode()):
        lengths.clear()
        passes(check, (b"x-api-key", sent))
        assert lengths == [(32, 32)] * 3, "the first one right, too, is compared with all"


def test_a_flood_of_keys_in_one_request_is_not_tried() -> None:
    check = ApiKeyCheck(["right", "one more"])
    wrong = [(b"x-api-key", b"wrong")] * SENT_MAX
    assert passes(check, *wrong, (b"x-api-key", b"right")) is None
    assert passes(check, *wrong[1:], (b"x-api-key", b"right")) == "right"


def test_a_worthless_key_beside_a_good_one_makes_nobody_someone_else(tmp_path: Path) -> None:
    """SDKs send `x-api-key: none` beside a bearer token: two users would be one by it."""
    edge = app_of(tmp_path, PROXY_API_KEYS="mine, theirs")
    body = {"input": [{"role": "user", "content": "hi"}]}
    response = {"id": "resp_1", "object": "response", "output": []}
    edge.routes.stored.keep(api_key_digest({"x-api-key": "mine"}), body, response)
    dummy = (b"x-api-key", b"none")

    def status(key: bytes, *more: tuple[bytes, bytes]) -> int:
        bearer = (b"authorization", b"Bearer " + key)
        return ask(edge, "GET", "/v1/responses/resp_1", bearer, *more).status

    assert [status(b"mine"), status(b"mine", dummy)] == [200, 200]
    assert [status(b"theirs"), status(b"theirs", dummy)] == [404, 404]
    assert [status(b"wrong"), status(b"wrong", dummy)] == [401, 401]
    assert status(b"wrong", (b"x-api-key", b"mine")) == 200, "any place will do for the right one"


# ---------------------------------------------------------------- what a worker remembers


def asked_again(desk: Desk, speaker: Speaker, call_ids: Sequence[str], **changes: Any) -> Any:
    """Return what is known when `speaker` echoes the answer that MINE got."""
    message = echo(replace(SAID, reasoning=""), call_ids, **changes)
    result = {"role": "tool", "tool_call_id": "x", "content": "done"}
    return desk.arrive([*QUESTION, message, result], speaker)


def test_another_keys_turns_are_not_found_by_id_place_or_signature() -> None:
    desk = Desk()
    first = desk.ask(QUESTION, SAID, sampled=[1, 2, 3], speaker=MINE)
    assert first.turn is not None
    ids, signature = first.turn.call_ids, first.turn.signature
    mine = asked_again(desk, MINE, ids)
    theirs = asked_again(desk, THEIRS, ids, signatures=[signature])
    at = len(QUESTION)
    assert (mine.states[at], theirs.states[at]) == (KEPT, RENDERED)
    assert mine.turns[at] is first.turn and theirs.turns[at] is None


def test_another_keys_thinking_is_not_healed_into_a_prompt() -> None:
    desk = Desk()
    desk.ask(QUESTION, SAID, speaker=MINE)
    desk.forget_turns()
    at = len(QUESTION)
    mine, theirs = asked_again(desk, MINE, ()), asked_again(desk, THEIRS, ())
    assert mine.messages[at]["reasoning_content"] == SAID.reasoning
    assert "reasoning_content" not in theirs.messages[at]
    assert (mine.healed, theirs.healed) == (1, 0)


def test_keys_are_apart_where_there_are_several(tmp_path: Path) -> None:
    """With one, as with none, what is kept is everybody's: also once the key is changed."""
    response = {"id": "resp_1", "object": "response", "output": []}
    for keys, status in (("", 200), ("mine", 200), ("mine, theirs", 404)):
        edge = app_of(tmp_path, PROXY_API_KEYS=keys)
        edge.routes.stored.keep("", {"input": "hi"}, response)
        bearer = (b"authorization", b"Bearer mine")
        assert ask(edge, "GET", "/v1/responses/resp_1", bearer).status == status
