"""Checks that requests captured from Claude Code, PI and Codex are parsed and can be sent on."""

from pathlib import Path
from typing import Any

import pytest

from hearth.commands.replay.traces import EXCERPTS_DIR, WHOLE_DIR, Captured, load_trace
from hearth.proxy.api.messages import messages_request
from hearth.proxy.api.responses import responses_request
from hearth.shared.wire_messages import Submit, decode, encode

PARSERS = {"messages": messages_request.parse, "responses": responses_request.parse}
PATHS = [
    path
    for folder in (EXCERPTS_DIR, WHOLE_DIR)
    for client in ("claude-code", "pi-session-3", "codex")
    for path in sorted(folder.glob(f"{client}*.xz"))
]


def rows_of(path: Path) -> list[Captured]:
    rows = [row for row in load_trace(path) if row.dialect in PARSERS]
    assert rows
    return rows


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.parent.name}/{path.stem}")
def test_what_clients_sent_can_be_carried(path: Path) -> None:
    for row in rows_of(path):
        request = PARSERS[row.dialect](row.body)
        submit = Submit("r", request.prompt, request.sampling, request.constraints)
        assert decode(encode(submit)) == submit
        assert request.constraints.tool_choice == "auto"
        assert set(request.left_out) <= {"web_search"}
        check_calls(request.prompt.messages)


def check_calls(rows: list[dict[str, Any]]) -> None:
    """Check that every result is of a call before it."""
    known = set()
    for row in rows:
        known |= {call["id"] for call in row.get("tool_calls", ())}
        assert row["role"] != "tool" or row["tool_call_id"] in known


@pytest.mark.skipif(not WHOLE_DIR.is_dir(), reason="the excerpt has none of Codex' namespaces")
def test_codex_offers_its_sub_agents_and_calls_them_by_the_same_name() -> None:
    offered, called = set(), set()
    for row in rows_of(WHOLE_DIR / "codex-session-1.jsonl.xz"):
        request = responses_request.parse(row.body)
        offered |= {tool["function"]["name"] for tool in request.prompt.tools}
        for message in request.prompt.messages:
            called |= {call["function"]["name"] for call in message.get("tool_calls", ())}
    assert "multi_agent_v1__spawn_agent" in called
    assert called <= offered
