"""The judge of replies: what is one well-formed end of a request, and what is not."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.api import server_sent_events as sse
from scripts.faults.judge_replies import judge

CHAT_ROWS: list[dict[str, Any]] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hel"}}]},
    {"choices": [{"index": 0, "delta": {"content": "lo"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
]
CHAT = b"".join(map(sse.data, CHAT_ROWS)) + sse.DONE
EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("message_start", {"message": {}}),
    ("ping", {}),
    ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
    ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": "Hello"}}),
    ("content_block_stop", {"index": 0}),
    ("message_delta", {"delta": {"stop_reason": "end_turn"}}),
    ("message_stop", {}),
]
MESSAGES = b"".join(sse.event(kind, row) for kind, row in EVENTS)
OUTPUT = [{"type": "message", "content": [{"type": "output_text", "text": "Hello"}]}]
RESPONSES = b"".join(
    [
        sse.event("response.created", {"sequence_number": 0, "response": {}}),
        sse.event(
            "response.completed",
            {"sequence_number": 1, "response": {"status": "completed", "output": OUTPUT}},
        ),
    ]
)
STREAMS = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}
ERROR = {"message": "The worker died.", "type": "server_error"}
REFUSED = {
    "chat": {"error": ERROR},
    "messages": {"type": "error", "error": ERROR},
    "responses": {"error": ERROR},
}


def stream(body: bytes) -> bytes:
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def reply(status: int, value: Any, more: bytes = b"") -> bytes:
    body = json.dumps(value).encode()
    head = b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n" % (status, more, len(body))
    return head + body


@pytest.mark.parametrize("dialect", STREAMS)
def test_a_whole_stream_is_an_answer_and_says_its_text(dialect: str) -> None:
    end = judge(dialect, True, stream(STREAMS[dialect]))
    assert (end.kind, end.said) == ("answered", "Hello"), end.detail


@given(dialect=st.sampled_from(sorted(STREAMS)), share=st.floats(0, 1, exclude_max=True))
def test_whatever_is_cut_off_is_no_answer(dialect: str, share: float) -> None:
    raw = stream(STREAMS[dialect])
    assert judge(dialect, True, raw[: int(len(raw) * share)]).kind == "cut"


@given(dialect=st.sampled_from(sorted(STREAMS)), share=st.floats(0, 1, exclude_max=True))
def test_a_stream_that_is_closed_early_is_malformed(dialect: str, share: float) -> None:
    body = STREAMS[dialect]
    assert judge(dialect, True, stream(body[: int(len(body) * share)])).kind == "malformed"


@pytest.mark.parametrize("dialect", STREAMS)
def test_a_second_end_is_malformed(dialect: str) -> None:
    body = STREAMS[dialect]
    last = body[body.rindex(b"\n\n", 0, -2) + 2 :]
    assert judge(dialect, True, stream(body + last)).kind == "malformed"
    assert judge(dialect, True, stream(body) + reply(200, {})).kind == "malformed"
    assert judge(dialect, True, stream(body + b": late\n")).kind == "malformed"


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("chat", {"choices": [{"message": {"content": "x"}, "finish_reason": None}]}),
        ("messages", {"type": "message", "stop_reason": None, "content": []}),
        ("responses", {"status": "in_progress", "output": []}),
    ],
)
def test_a_whole_answer_without_its_end_is_malformed(dialect: str, body: dict[str, Any]) -> None:
    assert judge(dialect, False, reply(200, body)).kind == "malformed"


@pytest.mark.parametrize("dialect", REFUSED)
def test_an_error_counts_in_the_dialect_of_its_caller_only(dialect: str) -> None:
    body = REFUSED[dialect]
    retry = b"retry-after: 5\r\n"
    assert judge(dialect, True, reply(400, body)).kind == "refused"
    assert judge(dialect, True, reply(503, body, retry)).kind == "busy"
    assert judge(dialect, True, reply(503, body)).kind == "malformed"
    assert judge(dialect, True, reply(500, body)).kind == "bug"
    assert judge(dialect, True, reply(400, {"detail": "no"})).kind == "malformed"
    assert judge(dialect, True, reply(400, {"error": {"message": ""}})).kind == "malformed"
    assert judge("messages", True, reply(400, {"error": ERROR})).kind == "malformed"
