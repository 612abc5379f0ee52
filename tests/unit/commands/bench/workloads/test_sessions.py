"""Sessions are cut and salted so that workloads share nothing and servers see the same."""

import copy
import json

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.results import ModelFacts
from hearth.commands.bench.server import Server
from hearth.commands.bench.servers.started_server import StartedServer
from hearth.commands.bench.workload import SCALES, Scale, Visit
from hearth.commands.bench.workloads.counted_tokens.captured_sessions import (
    CHAT,
)
from hearth.commands.bench.workloads.counted_tokens.forks_and_edits import forks_and_edits
from hearth.commands.bench.workloads.counted_tokens.shared_trunk import AGENTS, TURNS, agents
from hearth.commands.bench.workloads.sessions import (
    SESSIONS_DIR,
    cut,
    loaded,
    salt,
    salted,
    session,
)
from hearth.commands.replay.player import Target
from hearth.commands.replay.traces import Captured, waits_for

NAMES = sorted(path.name.removesuffix(".jsonl.xz") for path in SESSIONS_DIR.glob("*.xz"))
QUICK, WHOLE = SCALES["quick"], SCALES["whole"]


def visit(url: str = "", scale: Scale = QUICK) -> Visit:
    facts = ModelFacts("tiny", "text", "qwen3", 1)
    running = StartedServer(Target("http://127.0.0.1:1"))
    return Visit(Server("some", url=url), running, facts, scale, 0)


def first_text(row: Captured) -> str:
    """Return the text that a salt must stand in, whatever the dialect."""
    body = row.body
    first = body.get("system") or body.get("instructions") or body.get("messages") or body["input"]
    if isinstance(first, str):
        return first
    if "content" in first[0]:
        first = first[0]["content"]
    return first if isinstance(first, str) else " ".join(part["text"] for part in first)


# ---------------------------------------------------------------- shipped


@pytest.mark.parametrize("name", NAMES)
def test_a_session_is_the_same_each_time_and_nobody_elses(name: str) -> None:
    before = copy.deepcopy(loaded(name)[0].body)
    one, other = session(name, visit(), "one"), session(name, visit(), "other")
    assert one == session(name, visit(), "one")
    assert loaded(name)[0].body == before, "what is loaded is shared: it may not be changed"
    own = salt(visit(), "one")
    for mine, theirs in zip(one, other, strict=True):
        assert own in first_text(mine) and own not in json.dumps(theirs.body)
        for tool in (mine.body.get("tools") or ())[:1]:
            assert tool.get("function", tool)["description"].startswith(own)


@pytest.mark.parametrize("name", NAMES)
def test_a_salt_changes_nothing_but_where_it_stands(name: str) -> None:
    rows = cut(loaded(name), QUICK)
    for row, with_salt in zip(rows, salted(rows, "GRAIN "), strict=True):
        told = json.dumps(with_salt.body)
        tools = row.body.get("tools") or ()
        assert told.count("GRAIN ") == 1 + bool(tools)
        assert told.replace("GRAIN ", "") == json.dumps(row.body)


# ---------------------------------------------------------------- made


def texts(row: Captured) -> list[str]:
    return [json.dumps(each) for each in row.body["messages"]]


def shared(one: list[str], other: list[str]) -> int:
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
def test_edits_and_forks_leave_the_history_before_them(scale: Scale) -> None:
    rows = forks_and_edits(session(CHAT, visit(scale=scale), "some"))
    first, *_, last = rows[:4]
    at_end, in_middle, *forks, question, goes_on = rows[4:]
    count = len(texts(last))
    assert shared(texts(at_end), texts(last)) == count - 1 == len(texts(at_end)) - 1
    assert 1 < shared(texts(in_middle), texts(last)) < count - 1
    assert len(texts(in_middle)) == count
    assert {shared(texts(one), texts(last)) for one in forks} == {len(texts(rows[2]))}
    assert len({texts(each)[-1] for each in forks}) == len(forks) == 3
    assert shared(texts(question), texts(first)) == 1, "only the system prompt is left"
    assert shared(texts(goes_on), texts(last)) == count < len(texts(goes_on))


@given(st.integers(1, 3_000), st.text("ab ", max_size=4))
def test_eight_agents_share_the_trunk_and_no_task(tokens: int, grain: str) -> None:
    made = agents(tokens, grain)
    assert len(made) == AGENTS and all(len(rows) == TURNS for rows in made)
    assert len({texts(row)[0] for rows in made for row in rows}) == 1
    assert len({texts(rows[0])[1] for rows in made}) == AGENTS
    for rows in made:
        assert waits_for(rows, is_serial=False) == [[], [0]]
        assert shared(texts(rows[0]), texts(rows[1])) == len(texts(rows[0]))
