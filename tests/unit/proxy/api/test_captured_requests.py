"""Checks that what agents were seen to send is understood and can be carried."""

from pathlib import Path
from typing import Any

import pytest

from hearth.commands.replay.traces import EXCERPTS_DIR, WHOLE_DIR, load_trace
from hearth.proxy.api.dialects import DIALECTS
from hearth.shared.wire_messages import Submit, decode, encode

PATHS = [path for each in (EXCERPTS_DIR, WHOLE_DIR) for path in sorted(each.glob("*.xz"))]


def check_calls(rows: list[dict[str, Any]]) -> None:
    """Check that every result is of a call before it."""
    known = set()
    for row in rows:
        known |= {call["id"] for call in row.get("tool_calls", ())}
        assert row["role"] != "tool" or row["tool_call_id"] in known


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.parent.name}/{path.stem}")
def test_every_request_of_a_captured_session_is_understood(path: Path) -> None:
    rows = [row for row in load_trace(path) if row.dialect in DIALECTS]
    assert rows
    for row in rows:
        request = DIALECTS[row.dialect].parse(row.body)
        submit = Submit("r", request.prompt, request.sampling, request.constraints)
        assert decode(encode(submit)) == submit
        assert request.constraints.tool_choice == "auto"
        assert set(request.left_out) <= {"web_search"}
        check_calls(request.prompt.messages)
        if row.dialect == "chat":
            assert len(request.prompt.messages) == len(row.body["messages"])
            assert len(request.prompt.tools) == len(row.body.get("tools") or ())


def test_codex_offers_its_sub_agents_and_calls_them_by_the_same_name() -> None:
    path = WHOLE_DIR / "codex-session-1.jsonl.xz"
    if not path.exists():
        pytest.skip("the excerpt has none of Codex' namespaces")
    offered, called = set(), set()
    for row in load_trace(path):
        prompt = DIALECTS[row.dialect].parse(row.body).prompt
        offered |= {tool["function"]["name"] for tool in prompt.tools}
        calls = [call for message in prompt.messages for call in message.get("tool_calls", ())]
        called |= {call["function"]["name"] for call in calls}
    assert "multi_agent_v1__spawn_agent" in called
    assert called <= offered
