"""A worker that says it computes and gets no step further is stuck; nothing else is."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.workers.supervisor import HangDetector
from hearth.shared.wire_messages import Heartbeat


def beat(steps: int, running: int = 1, waiting: int = 0, state: str = "ready") -> Heartbeat:
    return Heartbeat(state, running, waiting, steps, 0, None)


def stalled_s(*beats: Heartbeat | None) -> float:
    """Return what the clock shows after one heartbeat each second."""
    clock = HangDetector()
    return [clock.tick(each, 1.0) for each in beats][-1]


LOADING = beat(0, state="loading")


@pytest.mark.parametrize(
    ("beats", "seconds"),
    [
        ([beat(7)] * 5, 4.0),
        ([beat(7, running=0, waiting=1)] * 5, 4.0),
        ([beat(number) for number in range(5)], 0.0),
        ([beat(7), beat(7), beat(7), beat(8)], 0.0),
        ([beat(7), beat(7), beat(7), beat(8), beat(8)], 1.0),
        ([beat(7, running=0)] * 5, 0.0),
        ([beat(7), beat(7), beat(7, running=0), beat(7)], 0.0),
        ([LOADING] * 5, 0.0),
        ([None] * 5, 0.0),
        ([*[LOADING] * 5, beat(0), beat(0)], 1.0),
    ],
)
def test_the_clock_runs_while_requests_are_held_and_no_step_is_made(
    beats: list[Heartbeat | None], seconds: float
) -> None:
    """Each step sets it back; it stands while the model loads, and before the first heartbeat."""
    assert stalled_s(*beats) == seconds


def test_only_time_that_was_watched_counts() -> None:
    clock = HangDetector()
    for elapsed_s in (1.0, 0.5, 0.25):
        clock.tick(beat(3), elapsed_s)
    assert clock.stalled_s == 0.75


# ---------------------------------------------------------------- a step that computes, on a CPU

STALL_S = 120.0


def after(
    seconds: int, cpu: Callable[[int], float], speed: float = 0.0, tokens: int = 0
) -> HangDetector:
    """Return what is known of a step after so long; `cpu` gives the CPU seconds at each."""
    detector = HangDetector()
    for second in range(seconds + 1):
        told: dict[str, Any] = {
            "cpu_s": cpu(second),
            "prefill_tokens_per_s": speed,
            "reading_tokens": tokens,
        }
        detector.tick(dataclasses.replace(beat(7), **told), 1.0)
    return detector


def busy(second: int) -> float:
    return 50.0 + second


def idle(second: int) -> float:
    return 50.0 + 0.003 * second  # its heartbeats


@given(share=st.floats(0.12, 2.0), speed=st.sampled_from([0.0, 3.0]))
def test_a_step_that_computes_does_not_hang_however_small_its_part_of_the_machine(
    share: float, speed: float
) -> None:
    slow = after(400, lambda second: share * second, speed, 256)
    assert not slow.hangs(STALL_S) and not slow.slowness(STALL_S)


def test_a_step_that_waits_hangs_as_ever() -> None:
    for cpu in (idle, lambda _second: 0.0):
        assert not after(119, cpu).hangs(STALL_S)
        assert after(121, cpu).hangs(STALL_S)
    gpu = after(121, lambda _second: 0.0, 130.0, 256)
    assert gpu.hangs(STALL_S), "it tells no CPU time"
    assert not gpu.slowness(STALL_S), "so that its end is proof against the prompt that it read"


def test_a_step_that_computed_for_a_while_and_then_waits_hangs() -> None:
    def breaks_off(second: int) -> float:
        return float(min(second, 300))

    assert not after(400, breaks_off).hangs(STALL_S)
    assert after(460, breaks_off).hangs(STALL_S), "as long before makes it no less stuck"


@pytest.mark.parametrize(
    ("speed", "tokens", "limit_s", "why"),
    [
        (0.0, 0, 1200, "10 times STALL_SECONDS, as its speed is not known"),
        (0.0, 256, 1200, "10 times STALL_SECONDS, as its speed is not known"),
        (130.0, 256, 120, "10 times what 256 tokens take at the 130 tokens/s"),
        (0.32, 256, 8000, "10 times what 256 tokens take at the 0.32 tokens/s"),
    ],
)
def test_a_step_that_goes_round_for_ever_ends_by_the_speed_that_was_measured(
    speed: float, tokens: int, limit_s: int, why: str
) -> None:
    assert not after(limit_s - 1, busy, speed, tokens).slowness(STALL_S)
    ended = after(limit_s + 1, busy, speed, tokens)
    assert not ended.hangs(STALL_S)
    told = ended.slowness(STALL_S)
    assert why in told and f"the limit is {limit_s} s" in told
    assert "set a smaller PREFILL_CHUNK or a larger STALL_SECONDS, or use a smaller model" in told


def test_the_next_step_has_its_own_time() -> None:
    detector = after(100, idle)
    for second in range(100):
        detector.tick(dataclasses.replace(beat(8), cpu_s=idle(100 + second)), 1.0)
    assert not detector.hangs(STALL_S)
