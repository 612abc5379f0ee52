"""The probes' verdicts: good on a server that keeps what it should, missed on one that does not."""

import re
from typing import Any

import pytest

from hearth.commands import diff_turns, inspect_cache, probe_agent, probe_cache, why
from tests.helpers.servers.probed_server import FakeServer, Flaws, Row, played


def probed(fake: FakeServer, *arguments: str) -> int:
    arguments = ("--tokens", "1500", *arguments)
    return played(probe_cache.probe_session, probe_cache.options_of, fake, *arguments)


# ---------------------------------------------------------------- probe_session


def test_four_scenarios_are_good_on_a_server_that_keeps_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakeServer()
    assert probed(fake) == 0
    out = capsys.readouterr().out
    assert "verdict: good: normal, drift, semantic, insertion as expected" in out
    assert re.search(r"canonical_drift +5 +5\n", out)
    sessions = {headers["x-session-id"] for _, headers in fake.asked}
    assert len(sessions) == 4, "a session for each scenario"
    assert 1400 < len(fake.rendered(fake.asked[0][0])) < 1700


@pytest.mark.parametrize(
    ("flaws", "missed"),
    [
        (Flaws(forgets=True), "normal: turn 3 hit 0.0000"),
        (Flaws(reads_telemetry=True), "billing header changed: hit"),
        (Flaws(rejects=True), "exact_key_rejected_by_model_lcp rose by 1"),
        (Flaws(drifts_counted=0), "message id changed: canonical_drift did not rise"),
        (Flaws(drifts_counted=2), "canonical_drift rose by 10, expected 5"),
        (Flaws(splits_lines=True), "the session has 2 lines, expected 1"),
    ],
)
def test_each_flaw_is_missed_by_name(
    flaws: Flaws, missed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probed(FakeServer(flaws), "--only", "normal", "--only", "drift") == 1
    out = capsys.readouterr().out
    assert "verdict: MISSED" in out and missed in out


@pytest.mark.parametrize("name", ["semantic", "insertion"])
def test_a_changed_history_is_missed_where_it_is_hidden_and_where_nothing_is_reused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probed(FakeServer(Flaws(hides=True)), "--only", name) == 1
    assert "it was hidden" in capsys.readouterr().out
    assert probed(FakeServer(Flaws(forgets=True)), "--only", name) == 1
    assert "0 tokens cached of at least" in capsys.readouterr().out


# ---------------------------------------------------------------- agent_probe


def agent(fake: FakeServer, *arguments: str) -> int:
    return played(probe_agent.agent_probe, probe_agent.options_of, fake, *arguments)


def test_an_agents_line_is_missed_where_answers_are_prefilled_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert agent(FakeServer(Flaws(forgets_answers=True))) == 1
    assert "main turn 2 prefilled" in capsys.readouterr().out


# ---------------------------------------------------------------- a session


def test_a_session_is_asked_of_the_server_under_its_quoted_id(capsys: Any) -> None:
    rows = [{"prompt": 5000, "completion": 10}, {"prompt": 5100, "cached": 4000}]
    lines: list[Row] = [{"line": 3, "kind": "main", "requests": rows}]
    fake = FakeServer(lines={"a/b c": lines})
    assert played(why.why, why.options_of, fake, "a/b c") == 1
    assert played(diff_turns.diff_turns, diff_turns.options_of, fake, "--session", "a/b c") == 1
    assert "session a/b c, line 3 main" in capsys.readouterr().out
    assert played(why.why, why.options_of, fake, "nobody") == 2
    assert played(why.why, why.options_of, FakeServer()) == 0
    assert "no session yet" in capsys.readouterr().out
    assert played(why.why, why.options_of, fake) == 0
    assert re.search(r"(?m)^a/b c +- +- +- +- +2 +0 +- +1.5$", capsys.readouterr().out)


# ---------------------------------------------------------------- inspect_cache

WORKER: Row = {
    "worker": 0,
    "reuses": True,
    "exact": False,
    "budget_bytes": 512 * 2**20,
    "bytes": 32 * 2**20,
    "budget_buffers": 1000,
    "buffers": 568,
    "slots": [{"slot": 0, "tokens": 2150, "bytes": 2**20, "busy": False, "line": 1}],
    "slots_bytes": 2**20,
    "slots_max": 4,
    "extents": 106,
    "snapshots": 0,
    "evictions": 0,
    "entries": [{"line": 1, "tokens": 2150, "hits": 3, "bytes": 2**19}],
    "pins": [{"id": "warm-1", "tokens": 44, "bytes": 2**19}],
    "pinned_bytes": 2**19,
    "pinned_bytes_max": 2**20,
    "disk": {
        "files": 7,
        "bytes_used": 3 * 2**20,
        "directory_bytes_used": 5 * 2**20,
        "bytes_max": 10 * 2**20,
        "bytes_written_today": 6 * 2**20,
        "write_bytes_per_day": 200 * 2**20,
        "queue_bytes": 0,
        "counts": {"reads": 8},
    },
    "counts": {"match_lcp": 14},
    "sessions": {"archive": {"written": 9}},
}


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({}, 0, "1 workers within their bounds"),
        ({"counts": {"exact_key_rejected_by_model_lcp": 0}}, 0, "good"),
        ({"counts": {"exact_key_rejected_by_model_lcp": 2}}, 1, "by_model_lcp is 2"),
        ({"bytes": 512 * 2**20 + 1}, 1, "bytes are 536,870,913 of 536,870,912"),
        ({"buffers": 1001}, 1, "buffers are 1,001 of 1,000"),
        ({"slots": WORKER["slots"] * 5}, 1, "5 slots of 4"),
        ({"error": "not ready"}, 1, "worker 0 cannot tell: not ready"),
        ({"error": "not ready", "state": "loading"}, 1, "worker 0 cannot tell: not ready"),
        ({"pinned_bytes": 2**20 + 1}, 1, "pinned_bytes are 1,048,577 of 1,048,576"),
        (
            {"disk": {"directory_bytes_used": 9, "bytes_max": 8}},
            *(1, "directory_bytes_used are 9 of 8"),
        ),
    ],
)
def test_a_workers_cache_is_shown_and_held_to_its_bounds(
    change: Row, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeServer(workers=[WORKER | change])
    assert played(inspect_cache.inspect_cache, inspect_cache.options_of, fake) == status
    assert said in capsys.readouterr().out
