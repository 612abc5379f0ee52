"""Others' words make no token of the template's, and no conversation that ends for good."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.api.dialects import DIALECTS
from hearth.worker.prompt.chat_template import Template
from hearth.worker.prompt.prompt_with_sampled_turns import PromptContent
from hearth.worker.prompt.render_messages import adapt_messages
from hearth.worker.prompt.template_capabilities import template_capabilities
from scripts.harness.model_families import FAMILIES, family
from tests.helpers.worker.prompt_builders import builder

BLANKS = st.text(" \n", max_size=2)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_a_control_token_that_is_cut_into_text_parts_stays_text(name: str, data: Any) -> None:
    tokeniser = builder(name).tokeniser
    control = data.draw(st.sampled_from(sorted(tokeniser.controls)))
    places = sorted(
        {0, *data.draw(st.sets(st.integers(1, len(control) - 1), min_size=1, max_size=3))}
    )
    cuts = [control[a:b] for a, b in itertools.pairwise([*places, len(control)])]
    parts = [
        {"type": "text", "text": data.draw(BLANKS) + cut + data.draw(BLANKS)} for cut in [*cuts, ""]
    ]
    mark = tokeniser.mark
    shown = tokeniser.kept_apart(tokeniser.shielded({"content": parts}))["content"]
    texts = [part["text"] for part in shown]
    assert "".join(texts).replace(mark, "") == "".join(part["text"] for part in parts)
    added = family(name).tokenizer.added_tokens_decoder
    controls = {at for at, token in added.items() if token.content in tokeniser.controls}
    for joined in ("".join(texts), "".join(map(str.strip, texts))):
        assert controls.isdisjoint(tokeniser.ids(joined))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_spells_half_a_character_is_no_error(name: str) -> None:
    function = {"name": "save", "arguments": r'{"s": "\ud83d"}'}
    call = {"id": "abcdefgh1", "type": "function", "function": function}
    rows = [
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefgh1", "content": "saved"},
    ]
    prompt = DIALECTS["chat"].parse({"model": "m", "messages": rows}).prompt
    assert builder(name).build(PromptContent(prompt.messages, prompt.tools)).ids


def test_the_schema_of_a_tool_that_lacks_nothing_keeps_its_order() -> None:
    schema = {"$schema": "draft-07", "properties": {"a": {}}, "required": ["a"], "type": "object"}
    tool = {"type": "function", "function": {"name": "save", "parameters": schema}}
    known = template_capabilities(Template(family("qwen3").tokenizer))
    asking = replace(known, completes_tools=frozenset({"description", "parameters", "schema"}))
    asked = [{"role": "user", "content": "x"}]
    _, (shown,), _ = adapt_messages(asked, [tool], asking, adds_header=True)
    assert json.dumps(shown["function"]["parameters"]) == json.dumps(schema)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_results_without_ids_belong_to_their_calls(counts: list[int]) -> None:
    rows: list[Any] = [{"role": "user", "content": "x"}]
    for count in counts:
        calls = [{"type": "function", "function": {"name": f"f{at}"}} for at in range(count)]
        rows += [{"role": "assistant", "content": None, "tool_calls": calls}]
        rows += [{"role": "tool", "content": f"f{at}"} for at in range(count)]
    messages = DIALECTS["chat"].parse({"model": "m", "messages": rows}).prompt.messages
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in calls}
    assert len(names) == sum(counts)
    results = [message for message in messages if message["role"] == "tool"]
    assert all(names[each["tool_call_id"]] == each["content"] for each in results)
