"""The watchdog: what has had its time ends, what was prefilled stays, and its slot is free."""

from pathlib import Path
from typing import Any

import pytest

from hearth.shared.wire_messages import Finished, Prompt, Up
from hearth.worker.schedule.request_state import Request
from hearth.worker.schedule.scheduler_config import GenerationWatchdog
from hearth.worker.stream.answer_parts import AnswerParts
from scripts.harness.agent_worker import Desk
from scripts.harness.model_families import family
from tests.helpers.worker.scripted_scheduler import (
    END,
    ScriptedDecoder,
    ScriptedEngine,
    finish_of,
    request,
    run,
    scheduler,
    text_of,
)


def started(name: str, generation_s: float = 0.0, stall_s: float = 0.0) -> tuple[Any, Request]:
    """Return a scheduler that decodes a request without an end, and that request."""
    watchdog = GenerationWatchdog(generation_s, stall_s)
    made, _ = scheduler(1, watchdog, **{name: [8] * 1_000, "next": [9]})
    asked = request(name, tokens_max=100_000)
    made.submit(asked)
    for _ in range(5):
        list(made.step())
    assert asked.times is not None and asked.completion_tokens
    return made, asked


def steps(made: Any, count: int = 3) -> list[Up]:
    return [event for _ in range(count) for event in made.step()]


def test_an_answer_that_takes_too_long_ends_with_length_and_frees_its_slot() -> None:
    made, asked = started("long", generation_s=600)
    made.submit(request("next"))
    assert not [e for e in steps(made) if isinstance(e, Finished)]
    assert asked.times is not None
    asked.times.prefilled_at -= 601
    events = run(made)
    assert finish_of(events, "long").reason == "length" and asked.times.is_expired
    assert made.counts["watchdog_ends"] == 1
    assert text_of(events, "next") == "i"


def test_a_request_that_gets_no_further_ends_though_its_time_is_not_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, asked = started("stuck", generation_s=600, stall_s=60)
    monkeypatch.setattr(ScriptedDecoder, "step", lambda self: [])  # a decoder that forgot it
    assert asked.times is not None
    asked.times.progressed_at -= 59
    assert not [e for e in steps(made) if isinstance(e, Finished)]
    asked.times.progressed_at -= 2
    assert finish_of(steps(made), "stuck").reason == "length"


def test_who_waits_for_slow_chunks_of_others_has_the_time_of_three(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, asked = started("beside", stall_s=60)
    monkeypatch.setattr(ScriptedDecoder, "step", lambda self: [])
    made.pace.chunk_s = 100.0  # on a CPU
    assert asked.times is not None
    asked.times.progressed_at -= 299
    assert not [e for e in steps(made) if isinstance(e, Finished)]
    asked.times.progressed_at -= 2
    assert finish_of(steps(made), "beside").reason == "length"


def test_the_tokens_of_a_forward_that_reads_a_prompt_are_known_while_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _ = scheduler(x=[8, END])
    read, told, prefill = [0], [0], ScriptedEngine.prefill

    def noted(engine: ScriptedEngine, cache: list[Any], ids: list[int], *rest: Any) -> None:
        told.append(made.pace.reading_tokens)
        read.append(len(ids))
        prefill(engine, cache, ids, *rest)

    monkeypatch.setattr(ScriptedEngine, "prefill", noted)
    made.submit(request("x", prompt=95))
    run(made)
    assert told == read and len(read) > 2
    assert made.pace.reading_tokens == 0, "an answer reads none"


def test_a_token_or_a_chunk_is_progress() -> None:
    made, asked = started("slow", stall_s=60)
    assert asked.times is not None
    for _ in range(3):
        asked.times.progressed_at -= 59
        assert not [e for e in steps(made, 1) if isinstance(e, Finished)]


def test_the_clock_of_an_answer_does_not_run_while_its_prompt_is_read() -> None:
    made, _ = scheduler(watchdog=GenerationWatchdog(600, 600), x=[8, END])
    asked = request("x", prompt=95)
    made.submit(asked)
    events: list[Up] = []
    for _ in range(8):
        events += made.step()
        assert asked.times is not None
        asked.times.prefilled_at -= 599
        asked.times.progressed_at -= 599
    assert not [e for e in events if isinstance(e, Finished)]


def test_a_prompt_that_gets_no_further_ends_too() -> None:
    made, _ = scheduler(watchdog=GenerationWatchdog(0, 60), x=[8])
    asked = request("x", prompt=95)
    made.submit(asked)
    list(made.step())
    assert asked.times is not None and not asked.is_prefilled
    asked.times.progressed_at -= 61
    assert finish_of(steps(made), "x").reason == "length"


@pytest.mark.parametrize("field", ["prefilled_at", "progressed_at"])
def test_without_limits_nothing_expires(field: str) -> None:
    made, asked = started("free")
    setattr(asked.times, field, -1e9)
    assert not [e for e in steps(made) if isinstance(e, Finished)]


def test_a_request_that_waits_has_no_clock() -> None:
    made, _ = started("first", generation_s=1e-9, stall_s=1e-9)
    waiting = request("second")
    made.submit(waiting)
    assert GenerationWatchdog(1e-9, 1e-9).verdict(waiting) is None


def test_half_an_answer_is_no_turn_and_its_prompt_stays_in_the_cache(tmp_path: Path) -> None:
    desk = Desk("qwen3", family("qwen3"), tmp_path, watchdog=GenerationWatchdog(600, 600))
    prompt = desk.named(Prompt([{"role": "user", "content": "Tell me a story of the harbor."}]))
    story = AnswerParts("", "It is a long story, and it has no end at all.", ())
    answer = desk.submit(prompt, story)
    desk.machine.run(until=lambda: answer.request.completion_tokens >= 2)
    assert answer.request.times is not None
    answer.request.times.prefilled_at -= 601
    desk.machine.run()
    assert answer.reason == "length" and 2 <= len(answer.request.sampled) < 10
    assert desk.sessions.counters()["turns"] == 0
    assert desk.sessions.session_rows() == []
    assert desk.foreseen == []
    again = desk.ask(prompt, story)
    assert again.cached == again.answer.request.query.limit
    assert desk.sessions.counters()["turns"] == 1
