"""Responses are kept for a while, for who asked for them, within bounds."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.api.responses import response_store
from hearth.proxy.api.responses.response_store import AGE_S_MAX, COUNT_MAX, ResponseStore
from hearth.proxy.request.session_id import api_key_digest
from hearth.shared.durable_journal import Journal
from hearth.shared.errors import RequestError
from tests.helpers.held_bytes import held_bytes
from tests.helpers.proxy.proxy_app import app_of, ask


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def answer(number: int, *output: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"resp_{number}", "object": "response", "output": list(output)}


def said(number: int, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text}
    return {"id": f"msg_{number}_0", "type": "message", "role": "assistant", "content": [part]}


def kept(store: ResponseStore, key: str = "k") -> ResponseStore:
    """Keep one exchange: "hi" was answered "yo"."""
    store.keep(key, {"input": "hi", "instructions": "old"}, answer(1, said(1, "yo")))
    return store


def refused(store: ResponseStore, key: str, body: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        store.expand(key, body)
    return caught.value


def test_a_conversation_goes_on_from_a_response_without_its_instructions() -> None:
    store = kept(ResponseStore())
    body = store.expand("k", {"input": "more", "previous_response_id": "resp_1"})
    rows = DIALECTS["responses"].parse(body).prompt.messages
    assert [(row["role"], row["content"]) for row in rows] == [
        ("user", "hi"),
        ("assistant", "yo"),
        ("user", "more"),
    ]
    store.keep("k", body, answer(2, said(2, "ok")))
    store.delete("k", "resp_1")  # what came after does not need it
    body = store.expand("k", {"input": [], "previous_response_id": "resp_2"})
    assert len(body["input"]) == 4
    assert body["previous_response_id"] == "resp_2"


def test_images_are_kept_as_they_were_sent_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "data:image/png;base64," + "iVBO" * 500
    part = {"type": "input_image", "image_url": url}
    store = ResponseStore()
    store.keep("k", {"input": [{"role": "user", "content": [part]}]}, answer(1, said(1, "yo")))
    assert store.nbytes > len(url)
    body = store.expand("k", {"input": "more", "previous_response_id": "resp_1"})
    (shown,) = DIALECTS["responses"].parse(body).prompt.messages[0]["content"]
    assert (shown["type"], shown["url"]) == ("image", url)
    monkeypatch.setattr(response_store, "BYTES_MAX", 2_000)  # it alone is more
    store.keep("k", body, answer(2, said(2, "ok")))
    error = refused(store, "k", {"input": "x", "previous_response_id": "resp_2"})
    assert error.status == 404 and "images included" in str(error)


def test_a_body_that_refers_to_nothing_stays_as_it_is() -> None:
    body = {"input": [{"role": "user", "content": "x"}], "previous_response_id": None}
    assert ResponseStore().expand("k", body) is body


def test_a_reference_is_the_item_itself() -> None:
    store = kept(ResponseStore())
    reference = {"type": "item_reference", "id": "msg_1_0"}
    assert store.expand("k", {"input": ["x", reference]})["input"] == ["x", said(1, "yo")]
    for wanted in ("msg_1_1", "msg_2_0", "what"):
        error = refused(store, "k", {"input": [reference | {"id": wanted}]})
        assert (error.status, error.param) == (404, "input[0].id")
    assert refused(store, "other", {"input": [reference]}).status == 404


def test_a_response_is_read_once_for_all_references_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore()
    store.keep("k", {"input": "hi"}, answer(1, said(1, "a"), said(1, "b") | {"id": "msg_1_1"}))
    reads = mock.Mock(wraps=store.response)
    monkeypatch.setattr(store, "response", reads)
    rows = [{"type": "item_reference", "id": f"msg_1_{number % 2}"} for number in range(100)]
    body = store.expand("k", {"input": rows})
    assert [row["id"] for row in body["input"]] == [row["id"] for row in rows]
    assert reads.call_count == 1


def test_nobody_reads_what_another_key_asked() -> None:
    store = kept(ResponseStore())
    error = refused(store, "other", {"input": "x", "previous_response_id": "resp_1"})
    assert (error.status, error.code) == (404, "previous_response_not_found")
    assert "Send the whole conversation" in str(error)
    for read in (store.response, store.delete):
        with pytest.raises(RequestError) as caught:
            read("other", "resp_1")
        assert (caught.value.status, caught.value.code) == (404, "not_found")
    assert store.response("k", "resp_1")["output"] == [said(1, "yo")]


def test_a_response_is_forgotten_after_a_while_or_when_it_is_deleted() -> None:
    clock = Clock()
    store = kept(ResponseStore(clock))
    clock.now_s = AGE_S_MAX
    assert store.response("k", "resp_1")
    clock.now_s = AGE_S_MAX + 1
    assert refused(store, "k", {"previous_response_id": "resp_1"}).status == 404
    assert (len(store), store.nbytes) == (0, 0)
    told = kept(store).delete("k", "resp_1")
    assert told == {"id": "resp_1", "object": "response", "deleted": True}
    assert refused(store, "k", {"previous_response_id": "resp_1"}).status == 404
    assert store.nbytes == 0


def test_the_oldest_go_first_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore()
    for number in range(COUNT_MAX + 5):
        store.keep("k", {"input": "hi"}, answer(number))
    assert len(store) == COUNT_MAX
    assert refused(store, "k", {"previous_response_id": "resp_4"}).status == 404
    assert store.response("k", "resp_5")
    monkeypatch.setattr(response_store, "BYTES_MAX", 2_000)
    store.keep("k", {"input": "x" * 1_000}, answer(9_999))
    assert store.nbytes <= 2_000
    assert store.response("k", "resp_9999")
    store.keep("k", {"input": "x" * 3_000}, answer(10_000))  # more than all may take
    assert store.response("k", "resp_9999")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.booleans()), max_size=30))
def test_the_bytes_are_counted(steps: list[tuple[int, int, bool]]) -> None:
    store = ResponseStore()
    for number, size, deletes in steps:
        if deletes and ("k", f"resp_{number}") in dict(store.everything()):
            store.delete("k", f"resp_{number}")
        else:
            store.keep("k", {"input": "x" * size}, answer(number))
        assert store.nbytes == sum(
            entry.nbytes for _, entry in store.everything() if entry is not None
        )


def test_the_input_is_listed_in_pages() -> None:
    store = ResponseStore()
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    store.keep("k", {"input": [*items, {"id": "own", "type": "reasoning"}]}, answer(1))
    page = store.items("k", "resp_1", {"limit": "2"})
    assert [row["id"] for row in page["data"]] == ["own", "in_1_4"]
    assert page["has_more"] and page["first_id"] == "own"
    page = store.items("k", "resp_1", {"order": "asc", "after": "in_1_3"})
    assert [row["id"] for row in page["data"]] == ["in_1_4", "own"]
    assert not page["has_more"]
    assert page["data"][0]["type"] == "message"
    for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "what"}):
        with pytest.raises(RequestError) as caught:
            store.items("k", "resp_1", query)
        assert caught.value.status == 400
    with pytest.raises(RequestError) as caught:
        store.items("k", "resp_2", {})
    assert caught.value.status == 404


OVERHEAD_BYTES = 600  # of an entry: its objects and their place in the table


@pytest.mark.parametrize("length", [1, 1_000, 1_500, 3_000, 20_000])
def test_stored_responses_hold_no_more_memory_than_is_counted(length: int) -> None:
    """The store is bounded by its bytes, so what it does not count is bounded by nothing."""
    store, response = ResponseStore(), {"text": "x" * length}
    store.keep("key", {"input": "Hi"}, {"id": "resp_0", **response})

    def fill() -> None:
        for number in range(1, 101):
            store.keep("key", {"input": "Hi"}, {"id": f"resp_{number}", **response})

    held = held_bytes(fill)
    assert len(store) == 101
    assert held <= store.nbytes + 101 * OVERHEAD_BYTES, held / 101


# ---------------------------------------------------------------- across restarts


def test_a_response_is_there_after_a_restart_and_not_beyond_its_hour(tmp_path: Path) -> None:
    clock, home = Clock(), tmp_path / "responses"
    clock.now_s = 1_000.0
    store = kept(ResponseStore(clock, home))
    clock.now_s += 60.0
    store.keep("k", {"input": "later"}, answer(2, said(2, "ok")))
    before = store.response("k", "resp_1"), store.items("k", "resp_1", {})
    nbytes = store.nbytes
    store.close()
    clock.now_s = 1_000.0 + AGE_S_MAX
    again = ResponseStore(clock, home)
    assert (len(again), again.nbytes) == (2, nbytes)
    assert (again.response("k", "resp_1"), again.items("k", "resp_1", {})) == before
    body = again.expand("k", {"input": "more", "previous_response_id": "resp_1"})
    assert [row.get("role") for row in body["input"]] == ["user", "assistant", "user"]
    assert refused(again, "other", {"previous_response_id": "resp_1"}).status == 404
    clock.now_s += 1.0
    assert refused(again, "k", {"previous_response_id": "resp_1"}).status == 404
    again.close()
    last = ResponseStore(clock, home)
    assert len(last) == 1 and last.response("k", "resp_2")
    last.close()


def test_a_deleted_response_is_gone_from_the_disk_too(tmp_path: Path) -> None:
    home = tmp_path / "responses"
    store = ResponseStore(directory=home)
    store.keep("k", {"input": "my secret"}, answer(1))
    assert store.journal.flush(10.0)
    (path,) = home.glob("*.journal")
    assert b"my secret" in path.read_bytes()
    store.delete("k", "resp_1")
    assert store.journal.flush(10.0)
    assert b"my secret" not in path.read_bytes()
    store.close()
    again = ResponseStore(directory=home)
    assert len(again) == 0
    again.close()


def test_no_key_stands_on_the_disk_and_what_is_not_to_be_stored_neither(tmp_path: Path) -> None:
    home = tmp_path / "responses"
    store = kept(ResponseStore(directory=home), "0123456789abcdef")
    store.keep("0123456789abcdef", {"input": "unstored", "store": False}, answer(2))
    store.close()
    octets = b"".join(each.read_bytes() for each in home.iterdir())
    assert b"resp_1" in octets
    assert b"0123456789abcdef" not in octets and b"unstored" not in octets


def test_records_that_are_no_responses_are_passed_over(tmp_path: Path) -> None:
    home = tmp_path / "responses"
    journal = Journal(home, response_store.SCHEMA)
    journal.append([journal.packed(row) for row in (7, [], ["a"], ["a", "b", 1.0])])
    journal.close()
    store = kept(ResponseStore(Clock(), home))
    assert len(store) == 1
    store.close()


# ---------------------------------------------------------------- their routes

RESPONSE = {"id": "resp_1", "object": "response", "output": []}


def test_a_kept_response_is_read_listed_and_deleted_by_who_asked_for_it(tmp_path: Path) -> None:
    edge = app_of(tmp_path, PROXY_API_KEYS="mine, other")
    key = api_key_digest({"x-api-key": "mine"})
    mine, other = ((b"authorization", f"Bearer {name}".encode()) for name in ("mine", "other"))
    for prefix in ("/v1/responses/", "/responses/"):
        path = f"{prefix}resp_1"
        edge.routes.stored.keep(key, {"input": [{"role": "user", "content": "hi"}]}, RESPONSE)
        assert ask(edge, "GET", path, mine).json == RESPONSE
        items = ask(edge, "GET", f"{path}/input_items", mine).json
        assert [row["content"] for row in items["data"]] == ["hi"]
        for method, theirs in (("GET", path), ("GET", f"{path}/input_items"), ("DELETE", path)):
            reply = ask(edge, method, theirs, other)
            assert (reply.status, reply.json["error"]["code"]) == (404, "not_found")
        assert ask(edge, "DELETE", path, mine).json["deleted"] is True
        assert ask(edge, "GET", path, mine).status == 404


def test_what_is_not_served_of_responses_says_so(tmp_path: Path) -> None:
    edge = app_of(tmp_path)
    for method, path, query, status in (
        ("POST", "compact", b"", 404),
        ("POST", "resp_1/cancel", b"", 404),
        ("PUT", "resp_1", b"", 405),
        ("GET", "resp_1", b"stream=true", 400),
    ):
        reply = ask(edge, method, f"/v1/responses/{path}", body=b"{}", query=query)
        assert reply.status == status, path
