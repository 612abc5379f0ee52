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
CALL = [
    {"index": 0, "function": {"name": "f", "arguments": '{"b": 1,'}},
    {"index": 0, "function": {"arguments": ' "a": 2}'}},
]
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


def test_a_stream_that_ends_in_its_error_has_failed() -> None:
    chat = b"".join(map(sse.data, CHAT_ROWS[:2]))
    assert judge("chat", True, stream(chat + sse.data({"error": ERROR}))).kind == "failed"
    assert judge("chat", True, stream(chat + sse.data({"error": ERROR}) * 2)).kind == "malformed"
    messages = MESSAGES[: MESSAGES.index(b"event: content_block_stop")]
    assert judge(
        "messages", True, stream(messages + sse.event("error", {"error": ERROR}))
    ).kind == ("failed")
    response = {"status": "failed", "error": {"code": "worker_unavailable", "message": "gone"}}
    responses = RESPONSES[: RESPONSES.index(b"event: response.completed")]
    responses += sse.event("response.failed", {"sequence_number": 1, "response": response})
    assert judge("responses", True, stream(responses)).kind == "failed"


def test_events_that_are_not_numbered_on_are_malformed() -> None:
    body = RESPONSES.replace(b'"sequence_number":1', b'"sequence_number":2')
    assert judge("responses", True, stream(body)).kind == "malformed"


def test_two_finish_reasons_or_none_are_malformed() -> None:
    twice = b"".join(map(sse.data, [*CHAT_ROWS, CHAT_ROWS[-1]])) + sse.DONE
    never = b"".join(map(sse.data, CHAT_ROWS[:-1])) + sse.DONE
    assert judge("chat", True, stream(twice)).kind == "malformed"
    assert judge("chat", True, stream(never)).kind == "malformed"


def test_a_block_left_open_is_malformed() -> None:
    stop = sse.event("content_block_stop", {"index": 0})
    assert judge("messages", True, stream(MESSAGES.replace(stop, b""))).kind == "malformed"


def test_calls_are_part_of_what_a_stream_says() -> None:
    rows = [{"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]} for call in CALL]
    chat = b"".join(map(sse.data, [*rows, CHAT_ROWS[-1]])) + sse.DONE
    assert judge("chat", True, stream(chat)).said == 'f{"b": 1, "a": 2}'
    block = {"index": 0, "content_block": {"type": "tool_use", "name": "f", "input": {}}}
    delta = {"index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"a": 2}'}}
    told = [sse.event("content_block_start", block), sse.event("content_block_delta", delta)]
    start, end = (
        MESSAGES.index(b"event: content_block_start"),
        MESSAGES.index(b"event: content_block_stop"),
    )
    messages = MESSAGES[:start] + b"".join(told) + MESSAGES[end:]
    assert judge("messages", True, stream(messages)).said == 'f{"a": 2}'
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    responses = RESPONSES.replace(json.dumps(OUTPUT).encode(), json.dumps([call]).encode())
    responses = responses.replace(_compact(OUTPUT), _compact([call]))
    assert judge("responses", True, stream(responses)).said == "f{}"


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


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


def test_a_length_that_does_not_fit_the_bytes_is_cut_or_malformed() -> None:
    whole = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}
    raw = reply(200, whole)
    assert judge("chat", False, raw).kind == "answered"
    assert judge("chat", False, raw[:-1]).kind == "cut"
    assert judge("chat", False, raw + b"x").kind == "malformed"


def test_only_who_speaks_no_dialect_may_be_told_by_closing() -> None:
    raw = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\nInvalid HTTP request received."
    assert judge("", False, raw).kind == "refused"
    assert judge("chat", False, raw).kind == "malformed"
    assert judge("", False, b"").kind == "cut"
