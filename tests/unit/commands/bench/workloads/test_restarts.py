"""Restarted and killed servers are asked the turn after what was read before."""

import asyncio

import pytest

from hearth.commands.bench.workload import Start
from hearth.commands.bench.workloads.server_lives import answers, restarts
from tests.helpers.bench.played_visits import IDS, Played, answered, made_visit, refused


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played().put_in(monkeypatch, restarts, answers)


def test_a_restarted_server_is_asked_the_next_turn_of_the_linear_session(played: Played) -> None:
    visit = made_visit()
    asyncio.run(answers.run_warm(visit))
    found = asyncio.run(restarts.run_restart(visit))
    ((asked,),) = played.measured
    last = answers.linear_session(visit)[-1]
    assert asked.body["messages"][:-2] == last.body["messages"]
    assert [each["role"] for each in asked.body["messages"][-2:]] == ["assistant", "user"]
    assert found.values["ideal_tokens"] == 1 and found.values["read_tokens"] == 7
    assert found.values["start_s"] == 2.5 and found.errors == ()


def test_the_session_asked_after_the_kill_goes_on_with_what_was_read_before(
    played: Played,
) -> None:
    visit = made_visit()
    before = asyncio.run(restarts.run_before_kill(visit))
    after = asyncio.run(restarts.run_kill(visit))
    read, (asked,) = played.measured
    assert len(read) == restarts.TURNS
    assert asked.body["messages"][:-2] == read[-1].body["messages"]
    assert (before.errors, after.errors) == ((), ())
    assert before.values["ideal_tokens"] == len(IDS) + 2 > after.values["ideal_tokens"] == 1


def test_nothing_is_measured_where_nothing_was_read_before(played: Played) -> None:
    for run in (restarts.run_restart, restarts.run_kill):
        found = asyncio.run(run(made_visit()))
        assert not found.values and "play the workload" in found.errors[0]
    assert played.rows == []


def test_a_session_whose_last_prompt_failed_is_not_asked_after_the_kill(played: Played) -> None:
    visit = made_visit()
    played.answer = lambda _: refused()
    assert "503 full" in asyncio.run(restarts.run_before_kill(visit)).errors[0]
    assert not asyncio.run(restarts.run_kill(visit)).values


@pytest.mark.parametrize("run", [restarts.run_restart, restarts.run_before_kill, restarts.run_kill])
def test_a_server_by_url_is_not_said_to_have_been_restarted(played: Played, run: object) -> None:
    visit = made_visit("http://127.0.0.1:1")
    visit.kept |= {answers.READ_ROWS: [answered()], restarts.BEFORE_KILL: [answered()]}
    assert callable(run)
    found = asyncio.run(run(visit))
    assert found.errors == (restarts.NOT_RESTARTED,) and not found.values and played.rows == []


def test_each_is_played_in_its_start() -> None:
    starts = {each.name: each.start for each in (*restarts.WORKLOADS, *restarts.KILL_WORKLOADS)}
    assert starts == {
        "restart": Start.RESTARTED,
        "before-kill": Start.RESTARTED,
        "kill": Start.KILLED,
    }
