"""Checks what a request's usage reports of its session, its kind and its cache match."""

from hearth.shared.wire_messages import Speaker, Usage
from hearth.worker.schedule.request_ending import TurnRecorder
from scripts.harness.socketless_worker import machine
from tests.helpers.worker.session_prompts import QUESTION, WORDS, Desk

TOOLS = [{"type": "function", "function": {"name": "read"}}]
TITLE = [{"role": "user", "content": "make a title"}]
NOBODY = Speaker("key", "")


def test_a_request_is_its_sessions_main_line_an_agents_or_a_side_call() -> None:
    desk = Desk()
    assert desk.arrive(QUESTION, tools=TOOLS).kind == "main"
    main = desk.arrive(QUESTION, tools=TOOLS)
    desk.end(main, WORDS)
    assert main.kind == "main"
    assert desk.arrive(TITLE).kind == "side"
    agent = desk.arrive(QUESTION, Speaker("key", "s1", agent="a"), tools=TOOLS)
    assert agent.kind == "agent"
    desk.end(agent, WORDS)
    assert agent.kind == "agent"
    assert desk.arrive(QUESTION, Speaker("key", "s2", parent="s1")).kind == "agent"
    assert desk.arrive(QUESTION, NOBODY).kind == "main"


def test_a_request_is_told_with_its_kind_and_one_in_no_session_has_none() -> None:
    desk, usage = Desk(), Usage(10, 10, 0, 3, match="prefix")
    recorder = TurnRecorder(desk.sessions, lambda: 0, lambda _: None)
    request = machine("qwen3", tiny=True).submit([1, 2, 3]).request
    assert request.session_context is None and usage.session_kind == "none"
    assert recorder.ended(request, usage, "stop", None) == usage
    request.session_context = desk.arrive(QUESTION, Speaker("key", "s1", agent="a"))
    assert recorder.ended(request, usage, "stop", None).session_kind == "agent"


def test_a_usage_tells_how_the_prompt_matched_and_how_long_it_waited_for_its_slot() -> None:
    busy = machine("qwen3", tiny=True, slots_max=1)
    first = busy.ask([*range(100)])
    again, waits = busy.submit([*range(100)], 20), busy.submit([*range(200, 300)])
    waits.request.lease.received_at = again.request.lease.received_at
    busy.run()
    assert first.usage is not None and again.usage is not None and waits.usage is not None
    assert [row.usage.match for row in (first, again, waits) if row.usage] == [
        *("miss", "exact", "miss")
    ]
    for row in (first.usage, again.usage, waits.usage):
        assert 0 <= row.queue_ms <= row.ttft_ms <= row.finish_ms
    assert waits.usage.queue_ms >= again.usage.finish_ms, "it had to wait for its end"


def test_a_request_that_left_before_it_had_a_slot_only_waited() -> None:
    busy = machine("qwen3", tiny=True, slots_max=1)
    answer, left = busy.submit([*range(100)]), busy.submit([*range(200, 300)])
    busy.step()
    left.request.lease.is_cancelled = True
    busy.run()
    assert answer.usage is not None and left.usage is not None
    assert (left.reason, left.usage.match, left.usage.prefilled_tokens) == ("cancelled", "none", 0)
    assert left.usage.queue_ms == left.usage.ttft_ms == left.usage.finish_ms
