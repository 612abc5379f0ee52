"""Live agent sessions: every token that was sampled is read once.

The model's own answers come back the way each client sends them; its words are scripted at token
level (scripts/harness/agent_worker.py), everything else is real. Forwards are real for one client:
clients differ in their texts, and no value of a layer is looked at.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from hearth.worker.stream.answer_parts import AnswerParts
from scripts.harness.agent_worker import Desk
from scripts.harness.model_families import family
from scripts.harness.zero_model import Layers, zero_model
from tests.helpers.clients.client_echoes import CLIENTS, CWD
from tests.helpers.servers.live_sessions import SCRIPT, TOOLS, held_to_the_ideal, step

KINDS = [("qwen3", "qwen3"), ("qwen3_5", "qwen3_5"), ("harmony", "gpt_oss")]
LAYERS: dict[str, Layers] = {"qwen3": "dense", "qwen3_5": "hybrid", "gpt_oss": "windowed"}
REAL = "claude-code"  # the client whose model computes


def scripted(family_name: str) -> list[AnswerParts]:
    """Return the script as that family can say it: harmony has either words or thinking."""
    return [
        replace(parts, content="") if family_name == "harmony" and parts.calls else parts
        for parts in SCRIPT
    ]


IN_EACH_RUN = {*((kind[0], True, "claude-code") for kind in KINDS), ("qwen3_5", False, "codex")}
IN_EACH_RUN |= {("qwen3", True, name) for name in CLIENTS}
CASES = [
    pytest.param(
        *(family_name, fixture, name, strips_thinking),
        id=f"{family_name}, {'stripped' if strips_thinking else 'thinking kept'}, {name}",
        marks=() if (family_name, strips_thinking, name) in IN_EACH_RUN else pytest.mark.night,
    )
    for family_name, fixture, strips_thinking in (*((*k, True) for k in KINDS), (*KINDS[1], False))
    for name in CLIENTS
]


@pytest.mark.parametrize(("family_name", "fixture", "client_name", "strips_thinking"), CASES)
def test_generated_tokens_are_never_read_again(
    family_name: str, fixture: str, client_name: str, strips_thinking: bool, tmp_path: Path
) -> None:
    """Two questions with a tool loop each, a sub-agent of another prompt in between."""
    model = None if client_name == REAL else zero_model(LAYERS[fixture])
    desk = Desk(fixture, family(family_name), tmp_path, model=model)
    client = CLIENTS[client_name](strips_thinking=strips_thinking, tools=TOOLS)
    helper = CLIENTS[client_name](system=f"Working directory: {CWD}\n" * 60, tools=TOOLS)
    client.user("Please fix the build. " * 5)
    helper.user("Where is it?")
    replies = []
    for number, parts in enumerate([*scripted(family_name)] * 2):
        replies.append(step(desk, client, parts))
        desk.idle()
        if number in (1, 2):
            replies.append(step(desk, helper, scripted(family_name)[number]))
            desk.idle()
        if not parts.calls:
            client.user(f"And now the tests, number {number}.")
    held_to_the_ideal(replies)
    counts = desk.sessions.counts
    assert counts["turns_changed"] == counts["exact_key_rejected_by_model_lcp"] == 0
    assert counts["turns_rendered"] == 0
