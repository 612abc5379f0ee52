"""The probes' verdicts: good on a server that keeps what it should, missed on one that does not."""

import argparse
import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.commands import diff_turns, inspect_cache, probe_agent, probe_cache, why
from hearth.commands.server_client import Answer, run, table
from hearth.commands.stream_client import Reading, Tokens, read_chat
from hearth.proxy.api.messages import messages_request
from hearth.proxy.request.message_digests import MessageDigester
from tests.helpers.servers.probed_server import (
    FakeServer,
    Flaws,
    Probe,
    Row,
    call_deltas,
    played,
)

pytestmark = pytest.mark.process


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
    fake = FakeServer(flaws)
    assert probed(fake, "--only", "normal", "--only", "drift") == 1
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


def test_what_drift_changes_is_volatile_by_the_servers_own_rules() -> None:
    fake = FakeServer()
    assert probed(fake, "--only", "drift") == 0
    prompts = [messages_request.parse(body).prompt for body, _ in fake.asked]
    named = [
        MessageDigester(is_on=True, checks_size=False).names(each.messages) for each in prompts
    ]
    heads = [(system, user) for (system, user, *_), _ in named]
    assert len({(system.canonical, user.canonical) for system, user in heads}) == 1
    assert len({system.exact for system, _ in heads}) == 1, "the billing header is no content"
    assert len({user.exact for _, user in heads}) == len(probe_cache.DRIFTS)


# ---------------------------------------------------------------- agent_probe


def agent(fake: FakeServer, *arguments: str) -> int:
    return played(probe_agent.agent_probe, probe_agent.options_of, fake, *arguments)


@pytest.mark.parametrize("echo", ["verbatim", "stripped", "trimmed"])
def test_an_agents_line_is_good_where_answers_are_kept(
    echo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeServer()
    assert agent(fake, "--echo", echo) == 0
    assert "12 requests" in capsys.readouterr().out


def test_an_agents_line_is_missed_where_answers_are_prefilled_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert agent(FakeServer(Flaws(forgets_answers=True))) == 1
    assert "main turn 2 prefilled" in capsys.readouterr().out


def test_sub_agents_speak_within_the_session_under_names_of_their_own() -> None:
    fake = FakeServer()
    assert agent(fake, "--turns", "4") == 0
    headers = [sent for _, sent in fake.asked]
    assert len({each["X-Claude-Code-Session-Id".lower()] for each in map(lowered, headers)}) == 1
    agents = [lowered(each).get("x-claude-code-agent-id", "") for each in headers]
    assert agents[:2] == agents[-2:] == ["", ""], "the orchestrator begins and ends"
    assert Counter(agents[2:-2]) == dict.fromkeys(probe_agent.SUB_AGENTS, probe_agent.SUB_TURNS)


def lowered(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def test_a_tool_call_is_answered_with_a_result_under_its_id() -> None:
    fake = FakeServer(calls_tools=True)
    assert agent(fake, "--turns", "2") == 0
    (last,) = (body for body, _ in fake.asked[-1:])
    *_, said, result = last["messages"]
    call = said["tool_calls"][0]
    assert (call["id"], call["function"]["name"]) == ("c1", "read")
    assert json.loads(call["function"]["arguments"]) == {"path": "a", "limit": 5000.0}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": probe_agent.RESULT}
    assert len(last["tools"]) == 12


def answer_of(text: str, reasoning: str, arguments: str) -> Answer:
    reading = Reading()
    for delta in call_deltas("c1", arguments):
        read_chat(reading, {"choices": [{"delta": delta}]})
    return Answer(Tokens(1, 0, 1, 1, ""), text, reasoning, list(reading.calls.values()))


def test_each_way_of_echoing_changes_what_its_clients_change() -> None:
    answer = answer_of(" Hi \n", "hm\n", '{"b": 5000.0, "a": "\\u00e9"}')
    verbatim = probe_agent.echoed(answer, "verbatim")
    assert (verbatim["content"], verbatim["reasoning_content"]) == (" Hi \n", "hm\n")
    assert verbatim["tool_calls"] == answer.calls
    assert "reasoning_content" not in probe_agent.echoed(answer, "stripped")
    trimmed = probe_agent.echoed(answer, "trimmed")
    assert (trimmed["content"], trimmed["reasoning_content"]) == ("Hi", "hm")
    assert trimmed["tool_calls"][0]["function"]["arguments"] == '{"b":5000,"a":"é"}'


@given(st.recursive(st.integers() | st.text() | st.booleans() | st.none(), st.lists))
def test_rewritten_arguments_mean_the_same(value: Any) -> None:
    (call,) = answer_of("", "", json.dumps(value)).calls
    assert json.loads(probe_agent.rewritten(call)["function"]["arguments"]) == value


@given(st.text())
def test_arguments_that_are_no_json_stay(text: str) -> None:
    (call,) = answer_of("", "", "{" + text).calls
    rewritten = probe_agent.rewritten(call)["function"]["arguments"]
    assert rewritten == "{" + text or json.loads(rewritten) == json.loads("{" + text)


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


def test_a_worker_that_keeps_nothing_has_no_bounds_to_miss() -> None:
    fake = FakeServer(workers=[{"worker": 0, "reuses": False, "counts": {}, "idle_tokens": 0}])
    assert played(inspect_cache.inspect_cache, inspect_cache.options_of, fake) == 0


def test_figures_slots_lines_and_pins_are_shown_as_the_server_tells_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakeServer(workers=[WORKER | {"vision": None}])
    assert played(inspect_cache.inspect_cache, inspect_cache.options_of, fake) == 0
    out = capsys.readouterr().out
    for line in (
        r"bytes +33,554,432",
        r"exact +False",
        r"vision +-",
        r"counts.match_lcp +14",
        r"sessions.archive.written +9",
        r"disk.counts.reads +8",
        r"slots\nslot +tokens +bytes +busy +line\n +0 +2,150 +1,048,576 +False +1",
        r"entries\nline +tokens +hits +bytes\n +1 +2,150 +3 +524,288",
        r"pins\nid +tokens +bytes\nwarm-1 +44 +524,288",
    ):
        assert re.search(rf"(?m)^{line}$", out), (line, out)


def test_as_many_rows_of_a_list_are_shown_as_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [{"line": number, "tokens": 7} for number in (11, 22, 33)]
    fake = FakeServer(workers=[WORKER | {"entries": lines}])
    assert played(inspect_cache.inspect_cache, inspect_cache.options_of, fake, "--lines", "2") == 0
    out = capsys.readouterr().out
    assert " 22 " in out and " 33 " not in out


def test_a_worker_that_is_unloaded_is_no_miss(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"worker": 0, "state": "unloaded", "error": "It is on disk."}
    fake = FakeServer(workers=[row, WORKER])
    assert played(inspect_cache.inspect_cache, inspect_cache.options_of, fake) == 0
    assert "It is on disk." in capsys.readouterr().out


# ---------------------------------------------------------------- without a verdict


@pytest.mark.parametrize(
    ("probe", "options"),
    [
        (probe_cache.probe_session, probe_cache.options_of([])),
        (probe_agent.agent_probe, probe_agent.options_of([])),
        (inspect_cache.inspect_cache, inspect_cache.options_of([])),
        (why.why, why.options_of(["abc"])),
        (diff_turns.diff_turns, diff_turns.options_of(["--session", "abc"])),
    ],
)
def test_without_a_server_there_is_no_verdict(
    probe: Probe, options: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    options.base_url = "http://127.0.0.1:9"
    assert run(probe(options)) == 2
    assert "does not answer" in capsys.readouterr().err


def test_a_stream_that_breaks_off_gives_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert probed(FakeServer(Flaws(breaks_off=True))) == 2
    assert "broke off" in capsys.readouterr().err


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    shown = table(("name", "n"), [("a", 1), ("long", 22_000)])
    assert shown.splitlines() == ["name       n", "a          1", "long  22,000"]
    assert table(("a", "b"), []) == "a  b"


def test_names_that_a_server_chose_give_a_terminal_nothing_to_obey(
    capsys: pytest.CaptureFixture[str],
) -> None:
    inspect_cache.show({"\x1b[2J": [{"\x1b]0;x\x07": "\x1b[1m"}]}, 20)
    assert "\x1b" not in capsys.readouterr().out
