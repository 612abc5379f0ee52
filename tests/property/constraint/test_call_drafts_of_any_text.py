"""Whatever an answer says: its call drafts never raise, and depend on what was said alone."""

import itertools
from functools import cache

from hypothesis import given, strategies as st

from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint.call_drafts import CallDrafts
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from scripts.harness.constrained_answers import constrainer_for, tool
from scripts.harness.model_families import family

PROPERTIES = {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}}
TOOLS = [tool("look", {"type": "object", "properties": PROPERTIES, "required": ["city"]})]
OTHERS = [tool("stop", None), tool("get", {"properties": {"n": {"type": "integer"}}})]
PIECES = [
    "<tool_call>",
    '<tool_call>\n{"name": "look", "arguments": {"city": "Ulm',
    '\n{"name": "look", "arguments": {"city": "',
    '", "unit": "celsius"}}\n</tool_call>',
    '"}}\n</tool_call>',
    "\n",
    "Ulm",
    '", "un',
    "</tool_call>",
    "<|im_end|>",
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=6).map("".join)


@cache
def compiler() -> GrammarCompiler:
    return constrainer_for(family("qwen3"))


def drafts() -> CallDrafts:
    found = compiler().call_drafts(Constraints(), TOOLS + OTHERS)
    assert found is not None
    return found


@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=4))
def test_forced_tokens_depend_on_what_was_said_and_not_on_when_they_are_asked_for(
    text: str, cuts: list[int]
) -> None:
    tokens = list(family("qwen3").tokenizer.encode(text, add_special_tokens=False))
    at_once, bit_by_bit = drafts(), drafts()
    at_once.take(tokens)
    places = [0, *sorted(cuts), len(tokens)]
    for start, end in itertools.pairwise(places):
        bit_by_bit.take(tokens[start:end])
        if end < len(tokens):
            bit_by_bit.forced(99)
    assert at_once.forced(99) == bit_by_bit.forced(99)
