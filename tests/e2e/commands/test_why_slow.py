"""The guide's commands, each as it stands there, on a session that lost something."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.documents import ROOT, CodeBlock, SnippetShell, blocks
from tests.helpers.servers.server import Server

WAIT_S = 60.0
GUIDE = ROOT / "docs" / "why-slow.md"
COMMANDS = [line for block in blocks(GUIDE) for line in block.text.splitlines()]
# What a command is known by -> what it shows.
SHOWS = {
    "hearth why my-session": ("tool added", "List tools in a stable order", "all explained"),
    "/v1/sessions/my-session": ('"cause":"tool added"',),
    "hearth cache": ("evictions", "within their bounds"),
    "/health": ('"running":', '"waiting":', '"wait_s":', '"queue":', '"prefills":'),
}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
HEAD = {"role": "system", "content": "You are careful. " + "Read what you are given twice. " * 60}
QUESTION = {"role": "user", "content": "What is the code of the gate?"}


def ask(server: Server, session: str, *messages: Any, **more: Any) -> dict[str, Any]:
    """Return the answer's message and what its usage tells of the cache."""
    body = {"model": "local", "messages": messages, "max_tokens": 8, "temperature": 0, **more}
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json=body,
        headers={"x-session-id": session},
        timeout=WAIT_S,
    )
    row = answer.raise_for_status().json()
    return {"said": row["choices"][0]["message"], **row["usage"]["kv_cache"]}


@pytest.fixture(scope="module")
def lossy(server: Server) -> Server:
    """A server whose `my-session` grew, and then had a tool added."""
    server.forget()
    first = ask(server, "my-session", HEAD, QUESTION)
    talk = [HEAD, QUESTION, first["said"], {"role": "user", "content": "And then?"}]
    assert ask(server, "my-session", *talk)["divergence"] is None
    lost = ask(server, "my-session", *talk, tools=[TOOL])["divergence"]
    assert lost["cause"] == "tool added", lost
    return server


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_guide_shows_what_it_says(
    lossy: Server, command: str, tmp_path: Path
) -> None:
    (shown,) = [texts for known, texts in SHOWS.items() if known in command]
    shell = SnippetShell(lossy.url, lossy.environment, tmp_path)
    done = shell.run(CodeBlock(GUIDE, 0, "sh", command, ""), WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [text for text in shown if text not in done.stdout] == [], done.stdout
