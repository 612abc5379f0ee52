"""Checks that the clock of waits leaves sleep out, whichever clocks of the system go on in it."""

from hearth.shared.suspending_clock import SuspendingClock

NIGHT_S = 8 * 3600.0


class Clock:
    """A system's clock that is set by hand."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def read_every_second(clock: Clock, awake: SuspendingClock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1.0
        awake.now()


def test_a_sleep_in_which_the_clock_goes_on_is_left_out() -> None:
    clock = Clock()
    awake = SuspendingClock(clock)
    read_every_second(clock, awake, 10)
    clock.now += NIGHT_S
    assert awake.now() == 110.0
    read_every_second(clock, awake, 10)
    assert awake.now() == 120.0


def test_the_short_wakes_of_a_night_count_by_themselves() -> None:
    clock = Clock()
    awake = SuspendingClock(clock)
    for _ in range(16):  # a Mac wakes by itself now and then, for some seconds
        clock.now += NIGHT_S / 16
        awake.now()
        read_every_second(clock, awake, 3)
    assert awake.now() == 100.0 + 16 * 3


def test_it_never_goes_back() -> None:
    clock = Clock()
    awake = SuspendingClock(clock)
    clock.now -= 60.0
    assert awake.now() == 100.0
    clock.now += 1.0
    assert awake.now() == 101.0
