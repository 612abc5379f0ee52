"""The verdicts of chaos and soak runs: whole replies, ends in calm and amid a fault, growth."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.api.server_sent_events import SSE_DONE, sse_data, sse_event
from scripts.faults.judge_replies import End, judge
from scripts.faults.load import AMID_A_FAULT, CALM, Asked, Ledger
from scripts.faults.own_server import MB, Held
from scripts.faults.soak import Round, misses

pytestmark = pytest.mark.process

CHAT_ROWS: list[dict[str, Any]] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hel"}}]},
    {"choices": [{"index": 0, "delta": {"content": "lo"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
]
CHAT = b"".join(map(sse_data, CHAT_ROWS)) + SSE_DONE
EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("message_start", {"message": {}}),
    ("ping", {}),
    ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
    ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": "Hello"}}),
    ("content_block_stop", {"index": 0}),
    ("message_delta", {"delta": {"stop_reason": "end_turn"}}),
    ("message_stop", {}),
]
MESSAGES = b"".join(sse_event(kind, row) for kind, row in EVENTS)
OUTPUT = [{"type": "message", "content": [{"type": "output_text", "text": "Hello"}]}]
RESPONSES = b"".join(
    [
        sse_event("response.created", {"sequence_number": 0, "response": {}}),
        sse_event(
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


def entered(stage: str, kind: str, later: str = "") -> Ledger:
    """Enter one end of a request that began in `stage` and ends in `later`."""
    ledger = Ledger()
    ledger.stage = later or stage
    ledger.note(stage, Asked("page", "chat", b""), End(kind), 0.0)  # type: ignore[arg-type]
    return ledger


def test_in_calm_an_answer_is_the_only_good_end() -> None:
    assert not entered(CALM, "answered").misses
    for kind in ("busy", "failed", "refused", "cut", "hung", "bug", "malformed", "wrong"):
        assert entered(CALM, kind).misses, kind


def test_amid_a_fault_an_error_is_a_good_end_and_a_wrong_answer_never() -> None:
    for kind in ("answered", *AMID_A_FAULT):
        assert not entered("flood", kind).misses
        assert not entered(CALM, kind, later="flood").misses
    for kind in ("refused", "cut", "hung", "bug", "malformed", "wrong"):
        assert entered(CALM, kind, later="flood").misses, kind
        assert entered("flood", kind).misses, kind


def rounds(rss: Sequence[float]) -> list[Round]:
    """Return rounds of a process that held so many MB at each."""
    return [
        Round(250 * (number + 1), [Held("proxy", int(each * MB), 20, 10)], *(5, 10, 7, 20))
        for number, each in enumerate(rss)
    ]


@pytest.mark.parametrize("rise", [2, 2 / 3])
def test_memory_that_rises_by_more_than_one_percent_is_a_miss(rise: float) -> None:
    found = list(misses(rounds([50] * 3 + [100] * 2 + [100 + rise * at / 4 for at in range(5)])))
    assert [text for text in found if "rss grew" in text] == found
    assert len(found) == (rise > 1)


def test_kv_above_its_budget_is_a_miss_at_once() -> None:
    seen = rounds([1] * 10)
    assert not list(misses([*seen[:9], replace(seen[9], kv=10, disk=20)]))
    assert "above its budget" in next(misses([*seen[:9], replace(seen[9], kv=11)]))
    assert "above its budget" in next(misses([*seen[:9], replace(seen[9], disk=21)]))


def test_a_process_that_is_not_there_all_the_time_is_a_miss() -> None:
    seen = rounds([1] * 10)
    found = list(misses([*seen[:9], replace(seen[9], held=[])]))
    assert found == ["a process was not there all the time"]
