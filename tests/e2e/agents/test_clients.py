"""The real agent clients, installed from npm, work against the real server on loopback.

The model's words are scripted at token level (helpers/worker_processes/scripted_worker.py); all
else is real.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.harness.agent_worker import ideals
from scripts.harness.model_families import family
from tests.helpers.clients.agent_projects import WORDS, installed, made_place
from tests.helpers.clients.run_clients import AGENTS, Agent, Place
from tests.helpers.servers.scripted_server import Asked, ScriptedServer
from tests.helpers.worker_processes.scripted_worker import AGAIN, MISSION, SMALL_TALK, THOUGHTS

SLACK = 16  # tokens that a step may prefill beyond what is new
SHARED_MIN = 0.80  # of the prompt of a fresh Claude Code session in a known directory

FAMILIES = ("qwen3", *(pytest.param(name, marks=pytest.mark.night) for name in ("qwen3_5", "glm4")))


@pytest.fixture(scope="module", params=FAMILIES)
def scripted(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    """Writes thinking and calls in one family's manner."""
    with ScriptedServer(request.param) as running:
        yield running


@pytest.fixture(params=AGENTS.values(), ids=list(AGENTS))
def agent(request: pytest.FixtureRequest) -> Agent:
    return installed(request.param)


def mission(place: Place) -> str:
    return f"{MISSION}{place.project}/start.txt"


def in_order(text: str) -> str:
    """Return how the model tells the words, once the client has read all three files."""
    return f"{text}: {', '.join(WORDS)}."


def held_to_the_ideal(rows: list[Asked]) -> None:
    """No step of a session reads again what was read or written before."""
    steps = [(row, ideal) for row, ideal in zip(rows, ideals(rows), strict=True) if row.states]
    assert steps
    for row, ideal in steps:
        assert set(row.states) <= {"kept"}, row.states
        assert row.prefilled <= ideal + SLACK, (row.prefilled, ideal, len(row.ids))


def test_a_client_reads_files_as_the_model_asks_and_goes_on_later(
    agent: Agent, scripted: ScriptedServer, tmp_path: Path
) -> None:
    """One tool call, then two at once, the answer; then the same session in a new process."""
    before = len(scripted.asked())
    place = made_place(tmp_path, scripted.url, agent.files)
    first = agent.run(place, mission(place))
    assert first.code == 0, (first.out, first.err)
    assert agent.said(first) == in_order("The words")
    second = agent.run(place, AGAIN, first)
    assert second.code == 0, (second.out, second.err)
    assert agent.said(second) == in_order("Once more")
    rows = [row for row in scripted.asked()[before:] if row.tools]
    assert len(rows) == 4
    held_to_the_ideal(rows)
    read = family(scripted.family_name).tokenizer.decode(rows[-1].ids)
    assert [thought for thought in THOUGHTS if thought in read] == list(THOUGHTS)
    assert not agent.warnings(place, first, second)


def test_two_fresh_sessions_of_claude_code_share_most_of_their_prompts(
    scripted: ScriptedServer, tmp_path: Path
) -> None:
    agent = installed(AGENTS["Claude Code"])
    place = made_place(tmp_path, scripted.url, agent.files)
    before = len(scripted.asked())
    runs = [agent.run(place, f"Hello from number {number}.") for number in range(2)]
    assert [agent.said(run) for run in runs] == [SMALL_TALK] * 2
    openings = [row for row in scripted.asked()[before:] if row.tools]
    assert len({row.session for row in openings}) == len(openings) == 2
    shared = openings[1].cached / len(openings[1].ids)
    assert shared >= SHARED_MIN, shared
