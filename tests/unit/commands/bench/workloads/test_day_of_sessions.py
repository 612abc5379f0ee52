"""The day plays ten sessions in turns; the memory of one is told of any model."""

import asyncio
import json
from pathlib import Path

import pytest

from hearth.commands.bench.server import Server
from hearth.commands.bench.workload import SCALES
from hearth.commands.bench.workloads.server_lives import day_of_sessions as day
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.bench.played_visits import Played, made_visit

QUICK = SCALES["quick"]


def test_each_session_waits_for_the_nine_others(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played().put_in(monkeypatch, day)
    found = asyncio.run(day.run(made_visit()))
    (rows,) = played.measured
    names = [row.trace for row in rows]
    assert len(rows) == 30 and len(set(names)) == 10
    assert names[:10] == names[10:20] == names[20:]
    assert found.values["requests"] == 30 and found.values["read_tokens"] == 7


def test_a_session_only_grows_and_shares_no_system_prompt() -> None:
    sessions = day.day_sessions(QUICK, "salt ")
    for session in sessions:
        bodies = [row.body["messages"] for row in session]
        assert [len(body) for body in bodies] == [2, 4, 6]
        assert bodies[2][:4] == bodies[1] and bodies[1][:2] == bodies[0]
    systems = {session[0].body["messages"][0]["content"] for session in sessions}
    assert len(systems) == 10 and all(system.startswith("salt ") for system in systems)


def test_the_day_is_the_same_whenever_it_is_made() -> None:
    assert day.day_sessions(QUICK, "a") == day.day_sessions(QUICK, "a")


def test_a_server_by_url_has_the_memory_that_its_owner_gave_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = Played().put_in(monkeypatch, day)
    found = asyncio.run(day.run(made_visit("http://127.0.0.1:1")))
    assert not found.values and "owner" in found.errors[0] and not played.rows


def test_a_server_whose_memory_nothing_bounds_plays_no_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played, visit = Played().put_in(monkeypatch, day), made_visit()
    visit.server = Server("unbounded")
    found = asyncio.run(day.run(visit))
    assert not found.values and "bounds" in found.errors[0] and not played.rows


def test_the_memory_of_one_is_what_its_live_cache_takes_by_the_models_own_layers() -> None:
    model = fixture_dir("qwen3")
    tokens = day.session_tokens(model, QUICK)
    assert tokens > QUICK.day_tokens
    config = json.loads((model / "config.json").read_text())
    heads = config["num_key_value_heads"] * config["head_dim"]
    row_bytes = 2 * config["num_hidden_layers"] * heads * 4  # it computes in float32 on a CPU
    least, most = (-(-tokens * row_bytes // (day.MB * part)) for part in (2, 1))
    assert least <= day.memory_mb(model, QUICK) <= 2 * most


def test_a_model_that_hearth_does_not_know_has_no_such_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(Exception, match="unheard-of"):
        day.memory_mb(tmp_path, QUICK)
