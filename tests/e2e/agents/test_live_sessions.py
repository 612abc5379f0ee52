"""Live agent sessions: every token that was sampled is read once.

The model's own answers come back the way each client sends them; its words are scripted at token
level (scripts/harness/agent_worker.py), everything else is real. Forwards are real for one client:
clients differ in their texts, and no value of a layer is looked at.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hearth.proxy.request.session_id import session_of
from hearth.shared.wire_messages import Prompt
from hearth.worker.stream.answer_parts import AnswerParts
from scripts.harness.agent_worker import Desk
from scripts.harness.model_families import family
from scripts.harness.zero_model import Layers, zero_model
from tests.helpers.clients.client_echoes import CLIENTS, CWD
from tests.helpers.servers.live_sessions import SCRIPT, TOOLS, held_to_the_ideal, prompt_of, step

KINDS = [("qwen3", "qwen3"), ("qwen3_5", "qwen3_5"), ("harmony", "gpt_oss")]
LAYERS: dict[str, Layers] = {"qwen3": "dense", "qwen3_5": "hybrid", "gpt_oss": "windowed"}
REAL = "claude-code"  # the client whose model computes


def scripted(family_name: str) -> list[AnswerParts]:
    """Return the script as that family can say it: harmony has either words or thinking."""
    return [
        replace(parts, content="") if family_name == "harmony" and parts.calls else parts
        for parts in SCRIPT
    ]


@pytest.mark.parametrize(
    ("family_name", "fixture", "strips_thinking"),
    [(*kind, True) for kind in KINDS] + [("qwen3_5", "qwen3_5", False)],
    ids=["dense, stripped", "hybrid, stripped", "window, stripped", "hybrid, thinking kept"],
)
@pytest.mark.parametrize("client_name", CLIENTS)
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


def test_a_turn_that_the_user_changed_is_shown_as_changed(tmp_path: Path) -> None:
    desk = Desk("qwen3", family("qwen3"), tmp_path)
    client = CLIENTS["pi"](tools=TOOLS)
    client.user("Please fix the build.")
    step(desk, client, SCRIPT[0])
    step(desk, client, SCRIPT[5])
    client.turns[-1]["content"] = "Done: nothing changed."
    client.user("Go on.")
    reply = desk.ask(prompt_of(desk, client), SCRIPT[5])
    shown = desk.family.tokenizer.decode(reply.ids)
    assert "Done: nothing changed." in shown
    assert "Done: two files changed." not in shown
    assert list(reply.states.values()) == ["kept", "changed"]
    assert reply.divergence is None, "of so short an answer nothing is read again"


def test_another_key_or_line_never_gets_a_turn_by_its_words(tmp_path: Path) -> None:
    desk = Desk("qwen3", family("qwen3"), tmp_path)
    said = AnswerParts("A secret plan.", "Let me check.")
    for key, question in (("k", "one"), ("k", "two"), ("other", "one")):
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        prompt = Prompt(messages)
        if (key, question) == ("k", "one"):
            desk.ask(desk.named(prompt, session_of({}, {}, key)), said)
        echo = {"role": "assistant", "content": "Let me check."}
        more = Prompt([*messages, echo, {"role": "user", "content": "so?"}])
        request = desk.request(desk.named(more, session_of({}, {}, key)))
        shown = "A secret plan." in desk.family.tokenizer.decode(request.ids)
        assert shown == ((key, question) == ("k", "one"))
