"""Answers taken apart, case by case, and the families' templates that the cases come from."""

import json
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.fixtures.checkpoint_files import VOCAB_SIZE
from scripts.harness.model_families import FAMILIES, Family, call_id, family, tools_for

READ = ToolCall("read_file", {"path": "a.py", "limit": 3, "range": {"lines": [1, 20], "raw": True}})
LIST = ToolCall("list_dir", {"path": "src/ü"})
TOOLS = tools_for([READ, LIST])
QUESTION = {"role": "user", "content": "What is in a.py?"}
CALL_TEXT = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>'


def said(each: Family, reasoning: str, content: str, *calls: ToolCall) -> AnswerParts:
    """As much of it as this family can say, and its template take back."""
    calls = calls[: each.calls_max]
    if calls and each.name in ("llama3", "mistral", "harmony"):
        content = ""
    return AnswerParts(reasoning if each.thinks else "", content, calls)


def read(name: str, text: str, is_thinking: bool = False) -> AnswerParts:
    return family(name).reader.read(text, is_thinking, TOOLS)


def conversation(each: Family, turn_count: int) -> list[dict[str, Any]]:
    """Questions, each answered after a tool loop of one step."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for turn in range(turn_count):
        call = ToolCall(
            "read_file", {"path": f"{turn}.py", "limit": turn, "range": {"lines": [turn]}}
        )
        ids = [call_id(2 * turn), call_id(2 * turn + 1)]
        parts = said(each, f"Thought {turn}.", f"Reading {turn}.", call, LIST)
        messages += [{"role": "user", "content": f"Question {turn}?"}]
        if parts.calls:
            messages += [each.message(parts, ids[: len(parts.calls)])]
            messages += [
                {"role": "tool", "tool_call_id": id, "content": f"Result {id}."}
                for id in ids[: len(parts.calls)]
            ]
        messages += [each.message(said(each, f"Afterthought {turn}.", f"Answer {turn}."))]
    return messages


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


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma3"])
def test_ten_turns_of_a_tool_conversation_render(name: str) -> None:
    each = family(name)
    messages = [*conversation(each, 10), QUESTION]
    prompt = each.render(messages, TOOLS)
    for turn in range(10):
        assert f"Question {turn}?" in prompt and f"Answer {turn}." in prompt
        assert f"Result {call_id(2 * turn)}." in prompt


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "glm4", "llama3", "gemma3"])
@pytest.mark.parametrize("has_content", [True, False])
def test_history_shows_a_turn_as_the_model_wrote_it(name: str, has_content: bool) -> None:
    """Within its tool loop: where a turn stays in place, its KV can stay, too."""
    each = family(name)
    parts = said(each, "Why not.", "Let me see." if has_content else "", READ, LIST)
    prompt = each.render([QUESTION], TOOLS)
    history = each.render([QUESTION, each.message(parts)], TOOLS, add_generation_prompt=False)
    whole = prompt + each.written(parts)
    assert history.startswith(whole)
    assert history[len(whole) :].strip() in ("", each.call_end)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "glm4", "harmony"])
def test_thinking_stays_in_its_tool_loop_and_goes_with_the_next_question(name: str) -> None:
    each = family(name)
    call = each.message(AnswerParts("Why not.", "", (READ,)))
    result = {"role": "tool", "tool_call_id": call_id(0), "content": "x = 1"}
    answer = each.message(AnswerParts("", "One."))
    assert "Why not." in each.render([QUESTION, call, result], TOOLS)
    assert "Why not." not in each.render([QUESTION, call, result, answer, QUESTION], TOOLS)


def test_qwen3_5_keeps_old_thinking_when_it_is_told_to() -> None:
    each = family("qwen3_5")
    messages = [QUESTION, each.message(AnswerParts("Why not.", "One.")), QUESTION]
    assert "Why not." not in each.render(messages)
    kept = each.render(messages, preserve_thinking=True)
    assert "<think>\nWhy not.\n</think>\n\nOne.<|im_end|>" in kept


def test_a_message_that_only_looks_like_a_tool_result_is_no_new_question() -> None:
    each = family("qwen3")
    result = {"role": "user", "content": "<tool_response>\nx = 1\n</tool_response>"}
    messages = [QUESTION, each.message(AnswerParts("Why not.", "", (READ,))), result]
    assert "Why not." in each.render(messages, TOOLS)


def test_a_harmony_prompt_has_the_channels_that_the_format_says() -> None:
    each = family("harmony")
    calling = each.message(AnswerParts("Why not.", "", (READ,)))
    result = {"role": "tool", "tool_call_id": call_id(0), "content": 'x = "1"'}
    system = {"role": "system", "content": "Be brief."}
    prompt = each.render([system, QUESTION, calling, result], TOOLS, reasoning_effort="high")
    head, _, tail = prompt.partition("<|start|>user")
    assert head.startswith("<|start|>system<|message|>You are ChatGPT")
    assert "Reasoning: high\n\n# Valid channels: analysis, commentary, final." in head
    assert "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n" in head
    assert "type read_file = (_: {\npath: string,\nlimit: number,\nrange: object,\n})" in head
    assert tail == (
        "<|message|>What is in a.py?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Why not.<|end|>"
        "<|start|>assistant to=functions.read_file<|channel|>commentary json<|message|>"
        f"{json.dumps(READ.arguments)}<|call|>"
        '<|start|>functions.read_file to=assistant<|channel|>commentary<|message|>"x = \\"1\\""'
        "<|end|><|start|>assistant"
    )


def test_a_harmony_answer_ends_with_end_in_history_and_with_return_in_training() -> None:
    each = family("harmony")
    messages = [QUESTION, each.message(AnswerParts("Why not.", "One."))]
    final = "<|start|>assistant<|channel|>final<|message|>One."
    assert f"<|end|>{final}<|end|><|start|>user" in each.render([*messages, QUESTION])
    trained = each.render(messages, add_generation_prompt=False)
    assert trained.endswith(f"<|channel|>analysis<|message|>Why not.<|end|>{final}<|return|>")


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
