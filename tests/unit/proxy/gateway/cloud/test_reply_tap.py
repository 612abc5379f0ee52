"""The response that a cloud's reply ends with is kept, however the reply is cut into chunks."""

import itertools
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given, settings, strategies as st

from hearth.proxy.gateway.cloud import reply_tap
from hearth.proxy.gateway.cloud.reply_tap import ReplyTap

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
BREAKS = st.sampled_from([b"\n", b"\r\n"])


def response(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "content": [part]}
    return {"id": "resp_1", "status": status, "output": [item]}


def event(kind: str, end: bytes = b"\n", **fields: Any) -> bytes:
    data = orjson.dumps({"type": kind} | fields)
    return b"event: %b%bdata: %b%b%b" % (kind.encode(), end, data, end, end)


def told(reply: bytes, *cuts: int, is_stream: bool = True, dialect: str = "responses") -> Any:
    tap = ReplyTap(dialect, is_stream=is_stream)
    places = sorted({0, len(reply), *(cut % (len(reply) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(places):
        tap.feed(reply[start:end])
    return tap.taken() if is_stream else tap.end()


@given(TEXT, BREAKS, st.sampled_from(["completed", "incomplete"]), st.lists(st.integers(0, 9_999)))
@settings(max_examples=300)
def test_a_stream_gives_its_end_wherever_it_is_cut(
    text: str, end: bytes, status: str, cuts: list[int]
) -> None:
    reply = b"".join(
        (
            event("response.created", end, response=response("", "in_progress")),
            b": a sign of life" + end + end,
            event("response.output_text.delta", end, delta="response.completed " + text),
            event(f"response.{status}", end, response=response(text, status)),
            b"data: [DONE]" + end + end,
        )
    )
    assert told(reply, *cuts) == response(text, status)
    assert told(reply, *range(len(reply))) == response(text, status)  # byte by byte


@given(TEXT, st.lists(st.integers(0, 9_999)))
def test_a_whole_reply_is_the_response_itself(text: str, cuts: list[int]) -> None:
    assert told(orjson.dumps(response(text)), *cuts, is_stream=False) == response(text)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"event: response.completed\ndata: {\n\n",
        event("response.failed", response=response("", "failed")),
        event("response.completed", response=response("", "failed")),
        event("response.completed", response=["response.completed"]),
        event("response.completed", response=response(""))[:-1],  # no blank line: cut off
        event("error", message="response.completed"),
        b'data: ["response.completed"]\n\n',
    ],
)
def test_what_is_no_final_response_gives_none(reply: bytes) -> None:
    assert told(reply) is None


def test_a_refusal_or_half_a_body_gives_none() -> None:
    for reply in (b'{"error": {"message": "no"}}', b"[1]", orjson.dumps(response("x"))[:-1], b""):
        assert told(reply, is_stream=False) is None
    assert told(orjson.dumps(response("", "failed")), is_stream=False) is None


def test_other_dialects_keep_nothing() -> None:
    reply = event("response.completed", response=response("x"))
    for dialect in ("chat", "messages", "completions"):
        assert told(reply, dialect=dialect) is None
        assert told(orjson.dumps(response("x")), is_stream=False, dialect=dialect) is None


def test_what_is_too_large_to_keep_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_tap, "BYTES_MAX", 400)
    large, small = response("x" * 500), response("y")
    end = event("response.completed", response=small)
    assert told(event("response.completed", response=large), *range(2_000)) is None
    assert told(event("response.in_progress", response=large) + end, *range(2_000)) == small
    lines = b"data: x\n" * 100
    assert told(lines + b"\n" + end) == small
    assert told(orjson.dumps(large), *range(2_000), is_stream=False) is None


def test_a_line_without_end_takes_no_memory_beyond_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reply_tap, "BYTES_MAX", 10_000)
    tap = ReplyTap("responses", is_stream=True)
    tracemalloc.start()
    try:
        for _ in range(1_000):
            tap.feed(bytes(1_000))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 30_000
    assert tap.taken() is None
