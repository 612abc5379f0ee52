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


def test_the_guide_has_a_command_for_each_thing_that_it_shows() -> None:
    assert [known for known in SHOWS if not any(known in command for command in COMMANDS)] == []


def test_what_the_terminal_and_the_guide_read_is_told_in_the_routes(lossy: Server) -> None:
    (worker,) = lossy.get("/v1/cache")["workers"]
    assert {"bytes", "budget_bytes", "evictions", "reuses"} <= worker.keys()
    sums = lossy.get("/v1/cache")["totals"]
    rows = [row for row in lossy.get("/v1/sessions")["recent"] if row["session"] == "my-session"]
    assert [bool(row["divergence"]) for row in rows] == [True, False, False], "the newest first"
    assert all(row["finish_ms"] >= row["ttft_ms"] >= row["queue_ms"] >= 0 for row in rows)
    assert not any(row["ended"] == "client_closed" for row in rows)
    lines = lossy.get("/v1/sessions/my-session")["lines"]
    matches = sorted(row["match"] for line in lines for row in line["requests"])
    assert matches == ["lcp", "miss", "prefix"]
    for name in ("prompt", "cached", "prefilled"):
        assert sums[f"{name}_tokens"] >= sum(row[name] for row in rows)
    assert sums["prompt_tokens"] == sums["cached_tokens"] + sums["prefilled_tokens"]
