"""Answers taken apart, case by case, and the families' templates that the cases come from."""

from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.fixtures.checkpoint_files import VOCAB_SIZE
from scripts.harness.model_families import FAMILIES, call_id, family, tools_for

READ = ToolCall("read_file", {"path": "a.py", "limit": 3, "range": {"lines": [1, 20], "raw": True}})
LIST = ToolCall("list_dir", {"path": "src/ü"})
TOOLS = tools_for([READ, LIST])
QUESTION = {"role": "user", "content": "What is in a.py?"}
CALL_TEXT = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>'


def read(name: str, text: str, is_thinking: bool = False) -> AnswerParts:
    return family(name).reader.read(text, is_thinking, TOOLS)


# ---------------------------------------------------------------- what the families are


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_fit_the_fixture_models_and_every_mark_is_one_token(name: str) -> None:
    each = family(name)
    assert len(each.tokenizer) <= VOCAB_SIZE
    for mark in (*each.controls, *each.marks):
        (token,) = each.tokenizer.encode(mark, add_special_tokens=False)
        assert each.tokenizer.decode([token]) == mark
    assert {each.answer_end, each.call_end, each.eos} <= set(each.ends) <= set(each.controls)
    assert each.tokenizer.eos_token_ids == set(each.tokenizer.convert_tokens_to_ids(each.ends))


@pytest.mark.parametrize(
    ("name", "options", "is_open"),
    [
        ("qwen3", {}, False),
        ("qwen3", {"enable_thinking": False}, False),
        ("qwen3_5", {}, True),
        ("qwen3_5", {"enable_thinking": False}, False),
        ("glm4", {}, False),
        ("harmony", {}, False),
        ("mistral", {}, False),
    ],
)
def test_the_generation_prompt_tells_whether_thinking_is_open(
    name: str, options: dict[str, Any], is_open: bool
) -> None:
    assert family(name).is_thinking(**options) == is_open


def test_a_harmony_prompt_that_begins_the_analysis_leaves_it_open() -> None:
    prompt = "<|start|>assistant<|channel|>analysis<|message|>"
    assert family("harmony").reader.is_thinking_open(prompt)


# ---------------------------------------------------------------- what the templates do


ASKED = {"role": "user", "content": "Again?"}
CHANNELS = "<|channel|>final<|message|>x"
RESULT = {"role": "tool", "tool_call_id": call_id(0), "content": "x"}


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        ("harmony", [QUESTION, RESULT], "no previous assistant message"),
        (
            "harmony",
            [QUESTION, family("harmony").message(AnswerParts("Why.", "Let me see.", (READ,)))],
            "both content and thinking",
        ),
        ("harmony", [{"role": "assistant", "content": CHANNELS}], "containing <.channel.> tags"),
        (
            "llama3",
            [QUESTION, family("mistral").message(AnswerParts("", "", (READ, LIST)))],
            "single tool-calls",
        ),
        ("mistral", [QUESTION, ASKED], "must alternate"),
        (
            "mistral",
            [
                QUESTION,
                family("mistral").message(AnswerParts("", "", (READ,)), ["call_0123456789"]),
            ],
            "length 9",
        ),
        ("gemma3", [QUESTION, ASKED], "must alternate"),
        ("qwen3_5", [{"role": "assistant", "content": "x"}], "No user query"),
        ("qwen3_5", [QUESTION, {"role": "system", "content": "x"}], "at the beginning"),
    ],
)
def test_a_template_refuses_what_the_family_does_not_know(
    name: str, messages: list[Any], reason: str
) -> None:
    with pytest.raises(TemplateError, match=reason):
        family(name).render(messages, TOOLS)


# ---------------------------------------------------------------- calls between marks


@pytest.mark.parametrize("name", ["qwen3", "harmony", "llama3", "mistral"])
def test_arguments_in_json_may_quote_any_mark(name: str) -> None:
    each = family(name)
    marks = [mark for mark in (*each.marks, *each.controls) if mark not in HARMONY_BOUNDARIES]
    call = ToolCall("write_file", {"text": "".join(marks), "name": CALL_TEXT})
    parts = AnswerParts(calls=(call,))
    assert each.reader.read(each.written(parts), False, tools_for([call])) == parts


HARMONY_BOUNDARIES = ("<|start|>", "<|end|>", "<|call|>", "<|return|>")


@pytest.mark.parametrize("name", ["qwen3_5", "glm4"])
@pytest.mark.parametrize("quoted", ["a</tool_call>b", "<tool_call>", CALL_TEXT, "</think>"])
def test_a_mark_in_an_argument_is_a_quoted_one(name: str, quoted: str) -> None:
    each = family(name)
    parts = AnswerParts("why", "", (ToolCall("list_dir", {"path": quoted}), LIST))
    assert read(name, each.written(parts), each.is_thinking()) == parts
