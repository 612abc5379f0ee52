"""Signals that stop a process, and those that end it at once."""

import signal

import pytest

from hearth.shared.stop_signals import SAY_AFTER_S, StopSignals

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("signals", "ended_by"),
    [
        ([(0.0, INT)], []),
        ([(0.0, INT), (0.01, INT), (SAY_AFTER_S - 0.01, TERM)], []),  # one, passed on twice
        ([(0.0, INT), (SAY_AFTER_S, INT)], [INT]),
        ([(0.0, HUP), (SAY_AFTER_S, TERM)], [TERM]),
        ([(0.0, INT), (SAY_AFTER_S, HUP)], []),  # its terminal was closed meanwhile
    ],
)
def test_a_second_signal_counts_once_the_first_had_time(
    signals: list[tuple[float, int]], ended_by: list[int]
) -> None:
    now = 0.0
    stops: list[None] = []
    ended: list[int] = []
    taken = StopSignals(lambda: stops.append(None), ended.append, lambda: now)
    for at, number in signals:
        now = at
        taken.take(number)
    assert len(stops) == 1 and ended == ended_by
