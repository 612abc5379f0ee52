"""Agent sessions with models whose template has no tools: told in text, and read only once.

As tests/e2e/agents/test_live_sessions.py: the model's words are scripted, everything else is real.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.harness.agent_worker import Desk
from scripts.harness.model_families import family
from tests.helpers.clients.client_echoes import CLIENTS
from tests.helpers.servers.live_sessions import SCRIPT, TOOLS, held_to_the_ideal, step

RESULTS = {
    "gemma3": "```tool_output\n",
    "chatml": "<tool_response>\n",
    "deepseek": "<tool_response>\n",
}


@pytest.mark.parametrize(
    ("family_name", "client_name"),
    [
        ("gemma3", "claude-code"),
        ("gemma3", "codex"),
        ("chatml", "claude-code"),
        ("chatml", "openclaw"),
        ("deepseek", "codex"),
        ("deepseek", "openclaw"),
    ],
)
def test_generated_tokens_are_never_read_again(
    family_name: str, client_name: str, tmp_path: Path
) -> None:
    """Two questions, each with a tool loop, and text of the user's beside a result."""
    desk = Desk("qwen3", family(family_name), tmp_path)
    client = CLIENTS[client_name](strips_thinking=True, tools=TOOLS)
    client.user("Please fix the build. " * 5)
    replies = []
    for number, parts in enumerate([*SCRIPT] * 2):
        said = parts if desk.family.thinks else replace(parts, reasoning="")
        replies.append(step(desk, client, said))
        assert replies[-1].given == said
        desk.idle()
        if number == 3:
            client.user("Hurry up.")
        if not parts.calls:
            client.user(f"And now the tests, number {number}.")
    held_to_the_ideal(replies)
    counts = desk.sessions.counts
    assert counts["turns_changed"] == counts["exact_key_rejected_by_model_lcp"] == 0
    assert counts["turns_rendered"] == counts["turns_doubtful"] == 0
    shown = desk.family.tokenizer.decode(replies[-1].ids)
    assert shown.count(RESULTS[family_name] + "result of ") == 10
