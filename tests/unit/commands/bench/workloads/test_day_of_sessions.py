"""The day plays ten sessions in turns; the memory of one is told of any model."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.server import Server
from hearth.commands.bench.workload import SCALES
from hearth.commands.bench.workloads.server_lives import day_of_sessions as day
from tests.helpers.bench.played_visits import Played, made_visit

QUICK = SCALES["quick"]
CONFIG = {
    "model_type": "unheard-of",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


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
    visit.server = Server("mtplx")
    found = asyncio.run(day.run(visit))
    assert not found.values and "bounds" in found.errors[0] and not played.rows


def test_a_config_of_unknown_layers_still_tells_its_keys_and_values(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tokens = day.session_tokens(tmp_path, QUICK)
    assert tokens > QUICK.day_tokens
    assert day.live_bytes(tmp_path, tokens) == tokens * 3 * 2 * 2 * 8 * 2
    assert day.memory_mb(tmp_path, QUICK) == 1
    large = tmp_path / "large"
    large.mkdir()
    (large / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 3000}))
    assert day.memory_mb(large, QUICK) == -(-tokens * 3000 * 64 // day.MB)


def test_a_config_that_tells_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="tells no size"):
        day.memory_mb(tmp_path, QUICK)


@given(layers=st.integers(1, 200), heads=st.integers(1, 64), groups=st.integers(1, 8), is_text=...)
def test_the_bytes_of_a_token_are_those_of_all_its_keys_and_values(
    layers: int, heads: int, groups: int, is_text: bool
) -> None:
    width = 16
    config = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads * groups,
        "num_key_value_heads": heads,
        "hidden_size": heads * groups * width,
    }
    told = {"text_config": config} if is_text else config
    kept = sum(width * day.VALUE_BYTES for _ in range(layers) for _ in range(heads) for _ in "kv")
    assert day.row_bytes(told) == kept
