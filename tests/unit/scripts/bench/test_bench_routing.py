"""The bench of routing deals sessions, counts and rules as it says."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hearth.commands.replay.player import Row
from hearth.commands.replay.traces import EXCERPTS_DIR, Captured, load_trace
from hearth.commands.stream_client import Outcome, Reading, Tokens
from hearth.proxy.request.session_id import session_of
from scripts.bench.routing.killed_worker import killed_table, line_text
from scripts.bench.routing.routing import at_once, chosen_traces, session_count, spread, table
from scripts.bench.routing.rules import RULES, TODAY, LeastBusy, RoundRobin
from scripts.replay.user_copies import as_user


@dataclass
class Worker:
    worker_id: int
    load: int = 0


def row(number: int, trace: str, prefilled: int) -> Row:
    tokens = Tokens(100, 100 - prefilled, prefilled, 4, "slot")
    outcome = Outcome(200, tokens, 0.1, 0.2, "", Reading(), f"r{number}")
    return Row(number, trace, "chat", outcome, None)


def test_the_balance_is_what_the_busiest_has_read_over_the_mean_of_all_workers() -> None:
    rows = [row(0, "a", 60), row(1, "a", 20), row(2, "b", 40)]
    fell = spread(rows, {"r0": 0, "r1": 2, "r2": 0}, 3)
    assert fell.requests_by_worker == {0: 2, 1: 0, 2: 1}
    assert fell.prefilled_by_worker == {0: 100, 1: 0, 2: 20}
    assert fell.balance == pytest.approx(100 / 40)
    assert fell.workers_a_session == pytest.approx(1.5)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_least_busy_takes_the_first_of_the_least_loaded(loads: list[int]) -> None:
    workers = [Worker(number, load) for number, load in enumerate(loads)]
    found = LeastBusy().choose(workers, [b"mark"])
    assert found is not None and found.worker_id == loads.index(min(loads))
    assert LeastBusy().choose([], []) is None


def test_round_robin_gives_each_worker_as_much_whatever_was_sent() -> None:
    rule, workers = RoundRobin(), [Worker(number, 9 - number) for number in range(3)]
    chosen = []
    for _ in range(6):
        found = rule.choose(reversed(workers), [b"mark"])
        assert found is not None
        rule.remember([b"mark"], found.worker_id)
        chosen.append(found.worker_id)
    assert chosen == [1, 2, 0, 1, 2, 0]
    assert rule.choose([], []) is None


def test_the_rule_that_is_used_is_among_those_that_are_measured() -> None:
    busy = [Worker(0, 5), Worker(1, 0)]
    gaps = {}
    for name in (TODAY, "gap_1", "gap_8"):
        rule = RULES[name](4)
        rule.remember([b"mark"], 0)
        found = rule.choose(busy, [b"mark"])
        assert found is not None
        gaps[name] = found.worker_id
    assert gaps == {TODAY: 1, "gap_1": 1, "gap_8": 0}


def sessions() -> list[list[Captured]]:
    return [load_trace(path, 4) for path in sorted(EXCERPTS_DIR.glob("*.xz"))]


@pytest.mark.parametrize("session", sessions(), ids=lambda rows: rows[0].trace)
def test_another_user_has_ids_of_their_own_and_shares_no_question(session: list[Captured]) -> None:
    copy = as_user(session, 2)
    assert as_user(session, 0) == session
    for was, now in zip(session, copy, strict=True):
        assert now.trace == f"{was.trace}#2" and now.path == was.path
        assert "(I am user 2.)" in str(now.body) and now.body.keys() == was.body.keys()
        assert now.body.get("tools") == was.body.get("tools")
        assert now.body.get("system") == was.body.get("system")
        theirs, own = (session_of(each.headers, each.body, "") for each in (was, now))
        assert own.client == theirs.client
        assert (own.session != theirs.session) == bool(theirs.session)
        assert len(own.session) == len(theirs.session)


def test_more_sessions_than_were_captured_are_those_of_further_users() -> None:
    captured = sessions()
    dealt = at_once(captured, 2 * len(captured) + 1)
    traces = [rows[0].trace for rows in dealt]
    assert len(set(traces)) == len(traces)
    assert dealt[: len(captured)] == captured and traces[-1] == f"{captured[0][0].trace}#2"


def test_sessions_are_counted_in_all_or_a_worker() -> None:
    assert session_count("10", 4) == 10
    assert session_count("2x", 4) == 8
    with pytest.raises(ValueError):
        session_count("many", 4)


def test_the_tables_tell_times_only_where_there_are_any() -> None:
    times = {"ttft_p50_s": 0.5, "ttft_p95_s": 1.5, "wall_s": 9.0}
    common = {"sessions": 4, "has_disk": True, "rule": "today", "ratio": 1.02, "balance": 1.1}
    common |= {"workers_a_session": 1.5}
    told = {"ratio": 1.03, "prompt": 200, "by_source": {"slot": 90, "ssd": 60}}
    lines = [
        common | {"workers": 2, "rounds": [told | {"ratio": 1.01} | times, told | times]},
        common | {"workers": 8, "rounds": [told]},
    ]
    two, eight = table(lines).splitlines()[2:]
    assert "| 1.020 | 1.010 1.030 | 30% | 1.10 | 1.5 | 0.50, 1.50 | 9.0 |" in two
    assert eight.endswith("| - | - |")


def test_a_killed_worker_is_told_with_what_was_read_more_than_needed() -> None:
    line = {"model": "qwen3", "has_disk": False, "after": 8, "prompt": 5000, "prefilled": 400}
    line |= {"excess": 8, "source": "ssd", "moved": True, "ttft_s": 0.25}
    assert line_text(line).endswith("read 400 of 5,000, 8 more than needed")
    assert "| none | 8 | 5,000 | 400 | 8 | ssd | yes | 0.25 |" in killed_table([line])


def test_the_command_has_what_the_documents_say() -> None:
    from scripts.bench.routing import routing

    parser = argparse.ArgumentParser()
    routing.add_arguments(parser)
    options = parser.parse_args(["--workers", "2", "--sessions", "2x", "--no-disk"])
    assert (options.workers, options.sessions, options.no_disk) == ("2", "2x", True)
    assert set(options.rules.split(",")) <= set(RULES)


def test_traces_are_chosen_by_name_and_a_missing_one_is_told(tmp_path: Path) -> None:
    def chosen(names: str, directory: Path) -> list[list[Captured]]:
        options = argparse.Namespace(traces=names, traces_dir=directory, limit=2)
        return chosen_traces(options)

    name = "openclaw-session-1"
    assert [rows[0].trace for rows in chosen(name, EXCERPTS_DIR)] == [name]
    assert chosen("", EXCERPTS_DIR) == [rows[:2] for rows in sessions()]
    with pytest.raises(SystemExit, match=r"no-such\.jsonl\.xz"):
        chosen(f"{name},no-such", EXCERPTS_DIR)
    with pytest.raises(SystemExit, match="--traces-dir"):
        chosen("", tmp_path)
