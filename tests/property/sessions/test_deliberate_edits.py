"""A change that a person makes on purpose in an assistant's turn reaches the ids of the prompt.

Random edits of excerpts of captured sessions and of live ones are made by deliberate_edits.py and
judged by hidden_changes.py (scripts/harness/changes). Attacks that once hid something stand in
tests/unit/worker/sessions/test_echo_attacks.py.
`python -m scripts.mutate_traces --edits N` does the same with whole sessions.
"""

import functools
from collections import Counter
from pathlib import Path

import pytest

from hearth.commands.replay.traces import load_trace
from scripts.harness import captured_sessions
from scripts.harness.agent_worker import Desk
from scripts.harness.captured_sessions import Exchange
from scripts.harness.changes.hidden_changes import FIXTURES, Proof
from scripts.harness.model_families import family
from tests.helpers.clients.client_echoes import CLIENTS, CWD
from tests.helpers.servers.live_sessions import SCRIPT, TOOLS, exchanges_of

TRACES = Path(__file__).parents[2] / "data" / "traces"
EDITS = 60  # of one captured session
LIVE_EDITS = 50  # of a live one
CAPTURED = {
    "claude-code-session-1": "qwen3_5",
    "codex-session-1": "harmony",
    "openclaw-session-1": "qwen3",
}
# What may become of an edit but that it reaches the model; all else hides it.
REACHED = {"shown", "in the ids"}
EXPLAINED = {
    *("thinking-stripped", "cd-stripped", "number-printed", "value-coerced"),
    *("as written", "template", "refused"),
}


@functools.cache
def captured(name: str) -> list[Exchange]:
    return captured_sessions.exchanges(load_trace(TRACES / f"{name}.jsonl.xz"))


def judged(proof: Proof, count: int) -> int:
    """Return how many edits reach the model; fails where one is hidden."""
    tried = proof.edits(count)
    verdicts = [(edit, proof.edited(edit)) for edit in tried]
    hidden = [f"{edit}: {verdict.finding}" for edit, verdict in verdicts if verdict.finding]
    assert not hidden, "\n".join(hidden)
    assert len({edit.kind for edit in tried}) > 30 and len(tried) == count
    found = Counter(verdict.outcome for _, verdict in verdicts)
    assert found.keys() <= {*REACHED, *EXPLAINED}
    return found["shown"] + found["in the ids"]


@pytest.mark.parametrize("name", CAPTURED)
def test_no_random_edit_of_a_captured_session_is_hidden(name: str, tmp_path: Path) -> None:
    found = judged(Proof(captured(name), CAPTURED[name], tmp_path), EDITS)
    least = 0.3 if CAPTURED[name] == "harmony" else 0.8  # whose template leaves much out
    assert found > least * EDITS, found


@pytest.mark.parametrize("client_name", ["claude-code", "codex", "opencode"])
def test_no_random_edit_of_a_live_session_is_hidden(client_name: str, tmp_path: Path) -> None:
    live = Desk(FIXTURES["qwen3_5"], family("qwen3_5"), tmp_path)
    session = exchanges_of(live, CLIENTS[client_name](tools=TOOLS), SCRIPT)
    found = judged(Proof(session, "qwen3_5", tmp_path, directory=CWD), LIVE_EDITS)
    assert found > 0.7 * LIVE_EDITS, found
