"""A rank that is silent, stuck, or was not told an operation is found, and no other."""

import pytest

from hearth.shared.zmq_transport import SILENCE_S_MAX
from hearth.worker.ranks.leader_link import RankBeat, RankWatch

HOSTS = ["192.168.2.1", "192.168.2.2"]


@pytest.mark.parametrize(("stall_s", "limit_s"), [(0, SILENCE_S_MAX), (120, SILENCE_S_MAX), (5, 5)])
def test_a_rank_that_says_nothing_is_lost(stall_s: float, limit_s: float) -> None:
    watch = RankWatch(HOSTS, stall_s, 100)
    watch.record_heard(1, 101)
    assert watch.check(101 + limit_s - 0.1) is None
    assert watch.check(101 + limit_s) == f"rank 1 of 2 (192.168.2.2) is silent for {limit_s:.0f} s"


def test_a_rank_that_ends_no_operation_is_stuck_after_stall_seconds() -> None:
    watch = RankWatch(HOSTS, 30, 0)
    for second in range(30):
        watch.record_beat(1, RankBeat(6, False, 9), 7, 9, second)
        assert watch.check(second) is None
    watch.record_heard(1, 30)
    assert watch.check(30) == (
        "rank 1 of 2 (192.168.2.2) is in operation 7 for 30 s (STALL_SECONDS)"
    )


def test_a_rank_that_loads_or_has_nothing_to_do_is_not_stuck() -> None:
    loading, idle = RankWatch(HOSTS, 30, 0), RankWatch(HOSTS, 30, 0)
    for second in range(100):
        loading.record_beat(1, RankBeat(second // 50 - 1, False, 0), 1, 0, second)
        idle.record_beat(1, RankBeat(7, True, 9), 7, 9, second)
        assert loading.check(second) is None
        assert idle.check(second) is None


def test_a_rank_that_waits_while_rank_0_computes_was_not_told() -> None:
    watch = RankWatch(HOSTS, 0, 0)
    left = RankBeat(done_count=7, is_waiting=True, witnessed_count=9)
    assert watch.record_beat(1, left, 7, 9, 0) is None
    assert watch.record_beat(1, left, 7, 10, 1) is None
    wrong = watch.record_beat(1, left, 7, 10, 2)
    assert wrong is not None and "rank 0 is in step 10 and it in 9" in wrong


def test_a_rank_that_is_told_meanwhile_is_only_late() -> None:
    watch = RankWatch(HOSTS, 0, 0)
    for told in range(7, 20):
        beat = RankBeat(done_count=told, is_waiting=True, witnessed_count=told)
        assert watch.record_beat(1, beat, told, told + 1, told) is None


def test_a_process_that_stood_still_takes_nobody_for_silent() -> None:
    watch = RankWatch(HOSTS, 30, 0)
    watch.restart_timers(1_000)
    assert watch.check(1_001) is None
