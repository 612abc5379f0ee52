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


def response(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "content": [part]}
    return {"id": "resp_1", "status": status, "output": [item]}


def event(kind: str, **fields: Any) -> bytes:
    data = orjson.dumps({"type": kind} | fields)
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def told(reply: bytes, *cuts: int, is_stream: bool = True, dialect: str = "responses") -> Any:
    tap = ReplyTap(dialect, is_stream=is_stream)
    places = sorted({0, len(reply), *(cut % (len(reply) + 1) for cut in cuts)})
    found = [tap.feed(reply[start:end]) for start, end in itertools.pairwise(places)]
    return next(filter(None, found), None) if is_stream else tap.end()


@given(TEXT, st.sampled_from(["completed", "incomplete"]), st.lists(st.integers(0, 9_999)))
@settings(max_examples=300)
def test_a_stream_gives_its_end_wherever_it_is_cut(text: str, status: str, cuts: list[int]) -> None:
    reply = b"".join(
        (
            event("response.created", response=response("", "in_progress")),
            b": a sign of life\n\n",
            event("response.output_text.delta", delta="response.completed " + text),
            event(f"response.{status}", response=response(text, status)),
            b"data: [DONE]\n\n",
        )
    )
    assert told(reply, *cuts) == response(text, status)
    assert told(reply, *range(len(reply))) == response(text, status)  # byte by byte


@given(TEXT, st.lists(st.integers(0, 9_999)))
def test_a_whole_reply_is_the_response_itself(text: str, cuts: list[int]) -> None:
    assert told(orjson.dumps(response(text)), *cuts, is_stream=False) == response(text)


LOST = response("", "failed")


@pytest.mark.parametrize("dialect", ["responses", "chat"])
@pytest.mark.parametrize(
    ("reply", "is_stream"),
    [
        (b"event: response.completed\ndata: {\n\n", True),
        (event("response.failed", response=LOST), True),
        (event("response.completed", response=LOST), True),
        (event("response.completed", response=["response.completed"]), True),
        (event("response.completed", response=response(""))[:-1], True),  # no blank line: cut off
        (event("error", message="response.completed"), True),
        (b'data: ["response.completed"]\n\n', True),
        (b'{"error": {"message": "no"}}', False),
        (b"[1]", False),
        (orjson.dumps(response("x"))[:-1], False),
        (b"", False),
        (orjson.dumps(LOST), False),
    ],
)
def test_what_is_no_final_response_gives_none(reply: bytes, is_stream: bool, dialect: str) -> None:
    assert told(reply, is_stream=is_stream, dialect=dialect) is None
    whole = orjson.dumps(response("x"))
    assert (told(whole, is_stream=False, dialect=dialect) is None) == (dialect == "chat")


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
    assert held < 40_000
