"""A worker that says it computes and gets no step further is stuck; nothing else is."""

from hearth.proxy.workers.hang_detector import HangDetector
from hearth.shared.wire_messages import Heartbeat


def beat(steps: int, running: int = 1, waiting: int = 0, state: str = "ready") -> Heartbeat:
    return Heartbeat(state, running, waiting, steps, 0, None)


def stalled_s(*beats: Heartbeat | None) -> float:
    """Return what the clock shows after one heartbeat each second."""
    clock = HangDetector()
    return [clock.tick(each, 1.0) for each in beats][-1]


def test_the_clock_runs_while_requests_are_held_and_no_step_is_made() -> None:
    assert stalled_s(*[beat(7)] * 5) == 4.0
    assert stalled_s(*[beat(7, running=0, waiting=1)] * 5) == 4.0


def test_each_step_sets_it_back() -> None:
    assert stalled_s(*(beat(number) for number in range(5))) == 0.0
    assert stalled_s(beat(7), beat(7), beat(7), beat(8)) == 0.0
    assert stalled_s(beat(7), beat(7), beat(7), beat(8), beat(8)) == 1.0


def test_a_worker_that_holds_nothing_is_not_stuck() -> None:
    assert stalled_s(*[beat(7, running=0)] * 5) == 0.0
    assert stalled_s(beat(7), beat(7), beat(7, running=0), beat(7)) == 0.0


def test_it_stands_while_the_model_loads_and_before_the_first_heartbeat() -> None:
    assert stalled_s(*[beat(0, state="loading")] * 5) == 0.0
    assert stalled_s(*[None] * 5) == 0.0
    assert stalled_s(*[beat(0, state="loading")] * 5, beat(0), beat(0)) == 1.0


def test_only_time_that_was_watched_counts() -> None:
    clock = HangDetector()
    for elapsed_s in (1.0, 0.5, 0.25):
        clock.tick(beat(3), elapsed_s)
    assert clock.stalled_s == 0.75
