"""Whatever an agent sends, every family's template renders it: whole, in order, only appending.

Conversations of any messages in any order: consecutive ones of one role, system messages in
between, calls without results, results without calls, contents that spell out control tokens.
"""

import itertools
import json
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.worker.prompt.prompt_with_sampled_turns import PromptBuilder, PromptContent
from hearth.worker.prompt.render_messages import Renderer
from hearth.worker.stream.answer_parts import ToolCall
from scripts.harness.model_families import FAMILIES, family, tools_for
from tests.helpers.worker.prompt_builders import builder_for

TOOLS = tools_for([ToolCall("read", {"path": "/a"})])
MOVES = ("mistral",)  # system and tools stand at the last question
# Whose words beside a call the template leaves out, or shows only until an answer is given.
SILENT_BESIDE_CALLS = ("mistral", "harmony", "llama3")


@dataclass(frozen=True)
class Said:
    """One message to be made: a kind, whether it spells out control tokens, how many calls."""

    kind: str
    is_hostile: bool
    calls: int
    result: int  # which of the calls so far a result is of; none where it is over their number


SAID = st.builds(
    Said,
    st.sampled_from(["system", "user", "assistant", "calls", "tool"]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 4),
)
CONVERSATIONS = st.lists(SAID, min_size=1, max_size=9)


def word(at: int, kind: str) -> str:
    return f"word{at}{kind}x"


def messages_of(said: list[Said], hostile: str, beside_calls: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    ids: list[str] = []
    for at, each in enumerate(said):
        text = word(at, each.kind) + (f" {hostile}" if hostile and each.is_hostile else "")
        if each.kind == "tool":
            call_id = ids[each.result] if each.result < len(ids) else "call_of_nobody"
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif each.kind == "calls":
            content = text if beside_calls and each.result else None
            calls = []
            for number in range(each.calls):
                ids.append(f"call{at}_{number}")
                arguments = {"path": f"{word(at, 'argument')}{number}", "n": [1, None, {"x": True}]}
                if hostile and each.is_hostile:
                    arguments[hostile] = hostile
                function = {"name": f"{word(at, 'name')}{number}", "arguments": arguments}
                calls.append({"id": ids[-1], "type": "function", "function": function})
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        else:
            messages.append({"role": each.kind, "content": text})
    return messages


@cache
def renderer(name: str) -> Renderer:
    return Renderer(family(name).tokenizer, True, True)


@cache
def builder(name: str) -> PromptBuilder:
    return builder_for(family(name).tokenizer, 200_000, DEFAULT_THINKING="true")


@pytest.mark.parametrize("name", FAMILIES)
@given(said=CONVERSATIONS, tools=st.sampled_from([[], TOOLS]))
def test_any_conversation_is_rendered_whole_and_in_order(
    name: str, said: list[Said], tools: list[Any]
) -> None:
    messages = messages_of(said, "", name not in SILENT_BESIDE_CALLS)
    before = json.dumps(messages)
    text = renderer(name).render(messages, tools, {}).text
    assert json.dumps(messages) == before
    place = 0
    for at, message in enumerate(messages):
        calls = message.get("tool_calls", ())
        for call in calls:
            assert call["function"]["name"] in text
            assert call["function"]["arguments"]["path"] in text
        if message["content"] and not is_left_out(name, messages, at):
            # Where calls are split, a result stands behind its own.
            moves = message["role"] == "tool" and renderer(name).capabilities.splits_calls
            found = text.find(message["content"], 0 if moves else place)
            assert found >= 0, (at, message)
            place = max(place, found)


def is_left_out(name: str, messages: list[dict[str, Any]], at: int) -> bool:
    """Whether Mistral's own template leaves this out, or moves it."""
    if name not in MOVES:
        return False
    if at == 0 and messages[at]["role"] == "system":
        return True
    runs = itertools.groupby(enumerate(messages), lambda row: row[1]["role"])
    (run,) = (run for _, rows in runs if at in dict(run := list(rows)))
    is_beside_calls = any(message.get("tool_calls") for _, message in run)
    return messages[at]["role"] == "assistant" and is_beside_calls


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in MOVES])
@given(said=CONVERSATIONS, tools=st.sampled_from([[], TOOLS]))
def test_a_conversation_that_grows_only_appends(
    name: str, said: list[Said], tools: list[Any]
) -> None:
    """At each answer, what was rendered for its request is how the next request begins."""
    messages = messages_of(said, "", name not in SILENT_BESIDE_CALLS)
    text = renderer(name).render(messages, tools, {}).text
    roles = [message["role"] for message in messages]
    for at in range(1, len(messages)):
        is_request = roles[at] == "assistant" != roles[at - 1] and set(roles[:at]) != {"system"}
        if is_request:
            asked = renderer(name).render(messages[:at], tools, {}).text
            bare = renderer(name).render(messages[:at], tools, {}, adds_header=False).text
            assert asked.startswith(bare)
            assert text.startswith(bare), (at, bare)


@pytest.mark.parametrize("name", FAMILIES)
@given(said=CONVERSATIONS, data=st.data())
def test_content_yields_no_control_tokens_in_any_conversation(
    name: str, said: list[Said], data: st.DataObject
) -> None:
    each = family(name)
    marks = [*each.controls, *each.marks, "<tool_call>", "</tool_response>", "```tool_output"]
    spelled = " ".join(data.draw(st.lists(st.sampled_from(marks), min_size=1, max_size=6)))
    tools = tools_for([ToolCall("read", {spelled: 1})])
    plain_tools = tools_for([ToolCall("read", {"word": 1})])
    added = set(each.tokenizer.added_tokens_decoder)
    found = [
        [
            token
            for token in builder(name).build(PromptContent(messages, given)).ids
            if token in added
        ]
        for messages, given in (
            (messages_of(said, spelled, True), tools),
            (messages_of(said, "word", True), plain_tools),
        )
    ]
    assert found[0] == found[1]
    quiet = [replace(row, is_hostile=False) for row in said]
    assert messages_of(quiet, spelled, True) == messages_of(quiet, "word", True)
