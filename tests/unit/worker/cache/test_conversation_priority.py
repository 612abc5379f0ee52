"""Checks how likely a conversation counts to go on, and which lines work for which others."""

import pytest

from hearth.worker.cache.conversation_priority import (
    HALF_LIFE_S,
    SPONSOR_WAIT_S,
    LinePriorities,
    LinePriority,
)
from scripts.harness.store_builders import new_line


def waiting_line(lines: LinePriorities, now: float, turns: int = 1) -> LinePriority:
    """Return a line whose answer has just ended."""
    line = lines.open(now, turns)
    lines.end_request(line, now)
    return line


def test_a_line_is_half_as_likely_after_its_half_life() -> None:
    line = new_line(used_at=100.0)
    assert line.likelihood(100.0, 0) == 1.0
    assert line.likelihood(100.0 + HALF_LIFE_S, 0) == 0.5
    assert line.likelihood(100.0 + 3 * HALF_LIFE_S, 0) == 0.125


def test_a_running_line_does_not_age() -> None:
    line = new_line(used_at=0.0)
    line.is_running = True
    assert line.likelihood(1e6, ttl_s=10.0) == 1.0


def test_a_line_expires_behind_its_ttl_and_not_before() -> None:
    line = new_line(used_at=0.0)
    assert line.likelihood(60.0, ttl_s=60.0) > 0.0
    assert line.likelihood(60.1, ttl_s=60.0) == 0.0
    assert line.likelihood(60.1, ttl_s=0) > 0.0, "0 means never"


def test_a_line_opened_while_another_waits_works_for_it_and_counts_less() -> None:
    lines = LinePriorities()
    orchestrator = waiting_line(lines, 0.0)
    agent = lines.open(1.0, 1)
    assert agent.sponsor is orchestrator and orchestrator.sponsor is None
    assert agent.likelihood(1.0, 0) < orchestrator.likelihood(1.0, 0)


def test_a_second_wave_works_for_the_orchestrator_and_not_for_the_first() -> None:
    lines = LinePriorities()
    orchestrator = waiting_line(lines, 0.0)
    first = [waiting_line(lines, 10.0 + number) for number in range(3)]
    second = lines.open(30.0, 1)
    assert {line.sponsor for line in [*first, second]} == {orchestrator}


def test_nobody_works_for_a_line_that_is_running_or_long_forgotten() -> None:
    lines = LinePriorities()
    running = lines.open(0.0, 1)
    assert lines.open(1.0, 1).sponsor is None, "two conversations at once"
    lines.end_request(running, 2.0)
    assert lines.open(2.1 + SPONSOR_WAIT_S, 1).sponsor is None


@pytest.mark.parametrize("turns", [1, 3])
def test_an_orchestrator_stays_likelier_than_its_agents_however_long_they_take(turns: int) -> None:
    lines = LinePriorities()
    orchestrator = waiting_line(lines, 0.0, turns)
    for start in range(10, 3610, 180):
        agent = waiting_line(lines, float(start), turns=1)
        lines.begin_request(agent, start + 60.0, 2)
        assert agent.sponsor is orchestrator
        assert agent.likelihood(start + 60.0, 0) < orchestrator.likelihood(start + 60.0, 0)
        lines.end_request(agent, start + 120.0)


def test_a_line_goes_on_with_more_turns_never_fewer() -> None:
    lines = LinePriorities()
    line = waiting_line(lines, 0.0, turns=3)
    lines.begin_request(line, 5.0, 2)
    assert (line.turns, line.is_running, line.used_at) == (4, True, 5.0)
    lines.end_request(line, 9.0)
    lines.begin_request(line, 10.0, 7)
    assert (line.turns, line.used_at) == (7, 10.0)


def test_agents_that_all_run_do_not_hide_whom_they_work_for() -> None:
    lines = LinePriorities()
    orchestrator = waiting_line(lines, 0.0)
    running = [lines.open(5.0, 1) for _ in range(3)]
    later = lines.open(5.0 + SPONSOR_WAIT_S, 1)
    assert {line.sponsor for line in [*running, later]} == {orchestrator}


@pytest.mark.parametrize(("holds", "runs"), [(True, False), (False, True), (False, False)])
def test_a_line_that_holds_nothing_is_forgotten_unless_it_runs(holds: bool, runs: bool) -> None:
    lines = LinePriorities()
    line = lines.open(0.0, 1)
    if not runs:
        lines.end_request(line, 1.0)
    lines.forget({line} if holds else set())
    lines.end_request(line, 1.0)
    assert lines.open(2.0, 1).sponsor is (line if holds or runs else None)


def test_a_sponsor_that_has_not_run_for_hours_neither_discounts_nor_stays() -> None:
    lines = LinePriorities()
    first = lines.open(0.0, 1)
    lines.end_request(first, 1.0)
    other = lines.open(60.0, 1)
    lines.end_request(other, 61.0)
    assert other.sponsor is first
    now = 61.0
    for _ in range(60):  # five hours of a second conversation with side calls
        now += 300.0
        lines.begin_request(other, now, 2)
        lines.end_request(other, now + 1)
        lines.end_request(lines.open(now + 2, 1), now + 3)
    assert other.likelihood(now, 1800.0) > 1.5
    assert first.likelihood(now, 1800.0) == 0.0
