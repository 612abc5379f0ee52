"""A chaos run's verdicts, and the figures by which what one key tells another is judged."""

import random
from collections.abc import Sequence

from scripts.faults import chaos, keys
from scripts.faults.load import Load
from scripts.faults.own_server import MB, Held, drafts_line


def run() -> chaos.Chaos:
    return chaos.Chaos(None, Load(1, 1), random.Random(1))  # type: ignore[arg-type]


def test_memory_has_grown_where_it_did_so_by_its_share_and_by_more_than_sessions_remember() -> None:
    def has_grown(before_mb: int, after_mb: int) -> bool:
        before, after = (Held("proxy", each * MB, 9, 9) for each in (before_mb, after_mb))
        played = run()
        played.compare(before, after)
        return bool(played.load.ledger.misses)

    assert not has_grown(150, 182)
    assert has_grown(150, 183)
    assert not has_grown(1_000, 1_050)
    assert has_grown(1_000, 1_051)
    assert not has_grown(183, 150)


def test_files_that_stay_open_are_missed() -> None:
    played = run()
    played.compare(Held("proxy", MB, 9, 9), Held("proxy", MB, 9 + chaos.FILES_MORE_MAX, 9))
    assert not played.load.ledger.misses
    played.compare(Held("proxy", MB, 9, 9), Held("proxy", MB, 10 + chaos.FILES_MORE_MAX, 9))
    assert list(played.load.ledger.misses) == ["the proxy has 9 -> 18 open files"]


def test_faults_are_named_as_they_are_asked_for() -> None:
    assert {"worker killed", "worker hung", "proxy killed", "disk full"} < set(chaos.FAULTS)
    assert set(chaos.ERRORS_S_MAX) < set(chaos.FAULTS)


def auc(said: Sequence[float], new: Sequence[float]) -> float:
    return keys.auc(said, new)


def test_equal_times_tell_nothing_and_shorter_ones_all() -> None:
    assert auc([1.0] * 40, [1.0] * 40) == 0.5
    assert auc([1.0] * 40, [2.0] * 40) == 1.0
    assert auc([2.0] * 40, [1.0] * 40) == 0.0


def test_a_machine_that_is_busy_for_a_while_hides_no_difference() -> None:
    busy = [1.0] * 40 + [10.0] * 40
    assert auc(busy, [each * 1.5 for each in busy]) > 0.9


def test_drafts_of_all_sources_and_workers_are_summed() -> None:
    sources = {"history": {"drafted": 5, "accepted": 2}, "forced": {"drafted": 1, "accepted": 1}}
    rows = [{"speculation": {"by_source": sources}}] * 2 + [{"error": "gone"}]
    assert drafts_line(rows) == "12 tokens were drafted, 6 of them accepted"
