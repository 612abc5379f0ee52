"""A deferred tool is shown where it is loaded."""

import copy
import json
from typing import Any

import pytest

from hearth.worker.prompt.render_messages import with_loaded_tools
from tests.helpers.cases import cases

BEGIN = "These tools are available from now on:\n<tools>\n"


def tool(name: str) -> dict[str, Any]:
    function = {"name": name, "description": "lädt", "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


def message_of(row: dict[str, Any]) -> dict[str, Any]:
    loads = {"tool_references": row["loads"]} if "loads" in row else {}
    role = next(iter(row))
    return {"role": role, "content": row[role], **loads}


@pytest.mark.parametrize("case", cases("prompt/deferred_tools.yaml"))
def test_a_loaded_tool_is_appended_to_one_message_and_all_else_is_as_it_was(
    case: dict[str, Any],
) -> None:
    messages = [message_of(row) for row in case["messages"]]
    tools = [tool(name) for name in case.get("listed", ["grep", "web"])]
    before = copy.deepcopy((messages, tools))
    placed = with_loaded_tools(messages, tools, case.get("loaded", []))
    assert (messages, tools) == before
    for old, new, names in zip(messages, placed, case["shown"], strict=True):
        lines = "".join(json.dumps(tool(name), ensure_ascii=False) + "\n" for name in names)
        said = f"{old['content']}\n" if old["content"] else ""
        content = f"{said}{BEGIN}{lines}</tools>" if names else old["content"]
        assert new == old | {"content": content}
