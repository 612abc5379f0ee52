"""Plays prompts and answers beside each other, by a clock that only they move."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.shared.wire_messages import Delta, Finished, Progress
from hearth.worker.schedule import prefill_forwards
from hearth.worker.schedule.prefill_forwards import ANSWERS_SHARE, OWED_S_MAX, TimeShares
from hearth.worker.schedule.scheduler import Scheduler
from tests.helpers.worker.scripted_scheduler import CHUNK, ScriptedEngine, request, scheduler

PROMPT = 8 * CHUNK + 1
STREAMS = ("a", "b", "c")
TOKEN_S = 0.1  # of a prompt, read
LINES = (f"chunk {CHUNK}", "step")  # of the log


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def slow(self, call: Callable[..., Any], seconds: Callable[..., float]) -> Callable[..., Any]:
        """Return `call`, which takes so many seconds for its arguments."""

        def slowed(*arguments: Any) -> Any:
            self.now += seconds(*arguments)
            return call(*arguments)

        return slowed


def timed(step_s: float, streams: int = 3, **parts: Any) -> tuple[Scheduler, ScriptedEngine, Clock]:
    """Return a scheduler that writes some answers, each of which has no end for now."""
    clock = Clock()
    names = STREAMS[:streams]
    made, engine = scheduler(
        slots=6,
        parts={"clock": clock, "short_tokens": 0, **parts},
        long=[1],
        **{name: [1] * 5_000 for name in names},
    )
    engine.prefill = clock.slow(  # type: ignore[method-assign]
        engine.prefill, lambda _cache, ids, *_: TOKEN_S * len(ids)
    )
    decoder: Any = engine.decoder
    decoder.step = clock.slow(decoder.step, lambda: step_s)
    for name in names:
        made.submit(request(name, prompt=3, tokens_max=4_000))
    while len(made._decoding) < streams:
        list(made.step())
    engine.decoder.log.clear()
    return made, engine, clock


def first_token(made: Scheduler, name: str, clock: Clock) -> float:
    """Compute until a request has its first text; return how long that took."""
    began = clock.now
    for _ in range(5_000):
        for event in made.step():
            if isinstance(event, (Delta, Finished)) and event.request_id == name:
                return clock.now - began
    raise AssertionError(f"{name} has no text")


def chunks_in_a_row(log: list[str]) -> int:
    """Return the most forwards of prompts between two steps of answers."""
    longest = run_of = 0
    for line in log:
        run_of = run_of + 1 if line.startswith("chunk") else 0 if line == "step" else run_of
        longest = max(longest, run_of)
    return longest


@pytest.mark.parametrize("step_s", [0.05, 0.3, 1.0])
def test_answers_wait_for_one_forward_and_a_prompt_at_most_twice_as_long(step_s: float) -> None:
    made, engine, clock = timed(step_s)
    made.submit(request("long", prompt=PROMPT))
    took = first_token(made, "long", clock)
    alone, _, quiet = timed(step_s, streams=0)
    alone.submit(request("long", prompt=PROMPT))
    assert chunks_in_a_row(engine.decoder.log) == 1
    assert took <= 2 * first_token(alone, "long", quiet) + step_s


def test_who_comes_goes_or_ends_does_so_amid_the_answers_turn() -> None:
    made, _engine, _clock = timed(step_s=0.01)
    made.submit(request("long", prompt=PROMPT))
    list(made.step())
    assert made._shares.is_answers_turn(False)
    leaving, arriving = made._decoding["a"], request("new", prompt=5, tokens_max=1)
    leaving.lease.is_cancelled = True
    made.submit(arriving)
    made.submit(request("kept", prompt=1, tokens_max=1))
    events = list(made.step())
    ends = [e.request_id for e in events if isinstance(e, Finished)]
    assert sorted(ends) == ["a", "kept"], "a prompt that is kept whole waits for nobody's turn"
    assert made.running == 4 and arriving.slot is not None, "it has a slot, and waits its turn"
    assert not any(isinstance(e, Progress) for e in events)


def test_nobody_waits_where_nothing_decodes_any_more() -> None:
    made, engine, _clock = timed(step_s=0.01, streams=1)
    made.submit(request("long", prompt=PROMPT))
    list(made.step())
    assert made._shares.is_answers_turn(False)
    made._decoding["a"].lease.is_cancelled = True
    list(made.step())
    assert not made._shares.is_answers_turn(False), (
        "nor does who begins to be written now get that time"
    )
    log = engine.decoder.log
    log.clear()
    for _ in range(5):
        list(made.step())
    assert log == [f"chunk {CHUNK}"] * 5


def test_a_long_prompt_waits_for_what_it_owes_itself_and_not_for_short_ones() -> None:
    made, engine, _clock = timed(step_s=0.1, short_tokens=2 * CHUNK)
    made.submit(request("long", prompt=PROMPT))
    made.submit(request("x", prompt=2 * CHUNK + 1, tokens_max=1))
    while "long" not in made._decoding:
        list(made.step())
    text = "".join("s" if line == "step" else "c" for line in engine.decoder.log if line in LINES)
    assert text.count("c") == 10
    own = ANSWERS_SHARE * 10 * 7  # steps for the forwards of the long one before its last
    assert own <= text.count("s") <= own + 10


@pytest.mark.parametrize(("agents", "tools_s"), [(1, 0.5), (2, 0.5), (3, 0.5), (3, 2.0)])
def test_an_endless_row_of_short_prompts_keeps_no_long_one_waiting(
    agents: int, tools_s: float
) -> None:
    """8 s alone; with their debt in its account it was read after 83 s, or never."""
    made, engine, clock = timed(0.03, streams=3, short_tokens=2 * CHUNK)
    for each in made._decoding.values():
        each.tokens_max = 1 << 30
        engine.decoder.scripts[each.request_id] = [1] * 100_000
    made.submit(request("long", prompt=PROMPT, tokens_max=1))
    began, number, due_at = clock.now, 0, dict.fromkeys(range(agents), clock.now)
    asked: dict[str, int] = {}
    ends: dict[str, float] = {}
    while "long" not in ends and clock.now - began < 100:
        for agent in [each for each, at in due_at.items() if at <= clock.now]:
            del due_at[agent]
            number += 1
            name = f"{agent} {number}"
            asked[name] = agent
            engine.decoder.scripts[name] = [1] * 20
            made.submit(request(name, prompt=CHUNK + 1, tokens_max=20))
        before = clock.now
        for event in made.step():
            if isinstance(event, Finished):
                ends[event.request_id] = clock.now - began
                if event.request_id in asked:
                    due_at[asked[event.request_id]] = clock.now + tools_s
        clock.now += 0.001 if clock.now == before else 0.0
    assert ends["long"] <= 5 * 8.0, "a fifth of the time is its own, at least"
    assert len(ends) > 3, "nor do the short ones wait for it"


def test_answers_do_not_wait_for_ever_for_short_prompts() -> None:
    shares = TimeShares()
    for _ in range(100):
        if not shares.is_answers_turn(True):
            shares.record_prefill(1.0, is_short=True)
        shares.record_decode(0.0)
    assert shares.owed_s <= OWED_S_MAX + 1.0
    shares.record_decode(OWED_S_MAX)
    assert not shares.is_answers_turn(True), "it is paid"


# ---------------------------------------------------------------- shorter forwards


def lengths(log: list[str]) -> list[int]:
    return [int(line.removeprefix("chunk ")) for line in log if line.startswith("chunk")]


def test_a_forward_that_answers_wait_for_takes_about_the_goal() -> None:
    """1 s a chunk of 10 tokens: for 0.3 s three tokens are read, evenly split up to the cut."""
    made, engine, clock = timed(0.05, beside_goal_s=0.3, beside_tokens_min=2)
    made.pace.record_chunk(1_000, 1_000 * TOKEN_S)
    asked = request("long", prompt=2 * CHUNK + 1)
    made.submit(asked)
    first_token(made, "long", clock)
    assert lengths(engine.decoder.log) == [3, 3, 2, 2, 3, 3, 2, 2]
    assert asked.prefill is not None and asked.prefill.is_cut_beside


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, [10, 10]),
        ({"beside_goal_s": 0.0, "beside_tokens_min": 2}, [10, 10]),
        ({"beside_goal_s": 0.01, "beside_tokens_min": 4}, [5, 5, 5, 5]),
        ({"beside_goal_s": 0.01, "beside_tokens_min": 6}, [10, 10]),
        ({"beside_goal_s": 9.0, "beside_tokens_min": 2}, [10, 10]),
    ],
)
def test_a_forward_is_no_shorter_than_the_floor_nor_than_it_has_to_be(
    parts: dict[str, Any], expected: list[int]
) -> None:
    made, engine, clock = timed(0.05, **parts)
    made.pace.record_chunk(1_000, 1_000 * TOKEN_S)
    asked = request("long", prompt=2 * CHUNK + 1)
    made.submit(asked)
    first_token(made, "long", clock)
    assert lengths(engine.decoder.log) == expected
    assert asked.prefill is not None
    assert asked.prefill.is_cut_beside == (len(expected) > 2)


# ---------------------------------------------------------------- the numbers alone


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=50))
def test_prompts_and_answers_get_the_same_but_for_one_forward_and_one_step(
    turns: list[tuple[float, float]],
) -> None:
    shares = TimeShares()
    read = written = step_max = 0.0
    for forward_s, step_s in turns:
        shares.record_prefill(forward_s, is_short=False)
        read += forward_s
        for number in range(1_000):
            if number and (not shares.is_answers_turn(False) or not step_s):
                break
            shares.record_decode(step_s)
            written, step_max = written + step_s, max(step_max, step_s)
        if step_s and max(s for _, s in turns) <= ANSWERS_SHARE * min(f for f, _ in turns):
            assert written <= ANSWERS_SHARE * read + step_max + 1e-6, (
                "a prompt takes at most twice as long"
            )
    if all(step_s > 0.1 for _, step_s in turns):
        assert not shares.is_answers_turn(False)


# ---------------------------------------------------------------- the log


def test_a_prefill_says_how_far_it_is_every_five_seconds_and_nothing_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hearth.worker.schedule.prefill_forwards")
    watch, length = Clock(), 30 * CHUNK + 1
    monkeypatch.setattr(prefill_forwards, "awake_s", watch)
    made, _ = scheduler(slots=1)
    asked = request("long", prompt=length)
    made.submit(asked)
    while not asked.position:
        list(made.step())
    assert asked.prefill is not None
    asked.prefill.logged_at, asked.prefill.logged_tokens = watch.now, asked.position
    said = []
    for _ in range(29):  # of a second each
        watch.now += 1.0
        before = len(caplog.messages)
        list(made.step())
        said += [(watch.now, message) for message in caplog.messages[before:]]
    assert asked.is_prefilled
    assert [at for at, _ in said] == [5.0, 10.0, 15.0, 20.0, 25.0]
    assert said[0][1] == (
        f"prefill request=long done={6 * CHUNK} of={length} tokens_per_s={CHUNK} left_s=24"
    )
