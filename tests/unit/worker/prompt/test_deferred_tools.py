"""A deferred tool is shown where it is loaded."""

import copy
import json
from typing import Any

import pytest

from hearth.worker.prompt.deferred_tools import with_loaded_tools

Messages = list[dict[str, Any]]


def tool(name: str, description: str = "does it") -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


GREP, WEB = tool("grep"), tool("web", "lädt")
DEFERRED = [GREP, WEB]
SYSTEM = {"role": "system", "content": "be brief"}
ASKED = {"role": "user", "content": "fix it"}
LATER = {"role": "user", "content": "and now"}


def loading(*names: str, content: str = "") -> dict[str, Any]:
    references = {"tool_references": list(names)} if names else {}
    return {"role": "tool", "tool_call_id": "x", "content": content, **references}


def shown(message: dict[str, Any]) -> list[str]:
    """Return the names of the tools that the message defines."""
    _, _, rest = message["content"].partition("<tools>\n")
    lines = rest.partition("\n</tools>")[0].splitlines()
    return [json.loads(line)["function"]["name"] for line in lines]


def all_shown(messages: Messages) -> list[list[str]]:
    return [shown(message) for message in messages]


# ---------------------------------------------------------------- loaded tools


def test_a_tool_is_appended_where_its_reference_stands() -> None:
    messages = [SYSTEM, ASKED, loading("grep", content="found"), LATER]
    placed = with_loaded_tools(messages, DEFERRED, ["grep"])
    assert all_shown(placed) == [[], [], ["grep"], []]
    definition = json.dumps(GREP)
    assert placed[2]["content"] == (
        f"found\nThese tools are available from now on:\n<tools>\n{definition}\n</tools>"
    )
    assert (placed[0], placed[1], placed[3]) == (SYSTEM, ASKED, LATER)


def test_a_reference_without_content_is_the_definitions_alone() -> None:
    for content in ("", None):
        message = {**loading("web", "grep"), "content": content}
        (placed,) = with_loaded_tools([message], DEFERRED, [])
        assert placed["content"].startswith("These tools are available")
        assert shown(placed) == ["web", "grep"], "in the order in which they are loaded"


def test_letters_of_every_language_stay_as_they_are() -> None:
    assert "lädt" in with_loaded_tools([loading("web")], DEFERRED, [])[0]["content"]


def test_what_is_loaded_changes_nothing_before_its_reference() -> None:
    """So that it is appended to the prompt, and the prompt's head stays."""
    before = [SYSTEM, ASKED, loading("grep")]
    first = with_loaded_tools(before, DEFERRED, ["grep"])
    more = with_loaded_tools([*before, LATER, loading("web")], DEFERRED, ["grep", "web"])
    assert more[:3] == first
    assert all_shown(more)[3:] == [[], ["web"]]


def test_after_a_compaction_a_tool_stands_behind_the_first_user_message() -> None:
    messages = [SYSTEM, {**ASKED, "content": "what was done"}, LATER]
    placed = with_loaded_tools(messages, DEFERRED, ["web", "grep"])
    assert all_shown(placed) == [[], ["web", "grep"], []]
    assert placed[1]["content"].startswith("what was done\nThese tools")


def test_only_tools_whose_reference_is_gone_stand_there() -> None:
    placed = with_loaded_tools([SYSTEM, ASKED, loading("web")], DEFERRED, ["grep", "web"])
    assert all_shown(placed) == [[], ["grep"], ["web"]]


@pytest.mark.parametrize("loaded", [["gone"], ["gone", "grep"]])
def test_a_tool_that_is_not_listed_is_never_shown(loaded: list[str]) -> None:
    messages = [SYSTEM, ASKED, loading("gone"), loading("gone", "grep")]
    placed = with_loaded_tools(messages, [GREP], loaded)
    assert all_shown(placed) == [[], [], [], ["grep"]]
    assert placed[:3] == messages[:3]


def test_without_deferred_tools_the_messages_are_what_they_were() -> None:
    messages = [SYSTEM, ASKED, loading("grep")]
    assert with_loaded_tools(messages, [], ["grep"]) is messages


def test_a_listed_tool_that_nobody_loaded_is_not_shown() -> None:
    messages = [SYSTEM, ASKED, loading()]
    assert with_loaded_tools(messages, DEFERRED, []) == messages


def test_without_a_user_message_nothing_is_placed_and_nothing_fails() -> None:
    assert with_loaded_tools([SYSTEM], DEFERRED, ["grep"]) == [SYSTEM]
    assert with_loaded_tools([], DEFERRED, ["grep"]) == []


def test_messages_and_tools_are_not_modified() -> None:
    messages = [SYSTEM, ASKED, loading("grep", content="found")]
    before = copy.deepcopy((messages, DEFERRED))
    placed = with_loaded_tools(messages, DEFERRED, ["web", "grep"])
    assert (messages, DEFERRED) == before
    assert placed[0] is messages[0] and placed[2] is not messages[2]
