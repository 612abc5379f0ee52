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
CALL = ToolCall("read_file", {"path": "a.py"})


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


@pytest.mark.parametrize(
    ("name", "parser", "thinking"),
    [
        ("qwen3", "json_tools", "<think>"),
        ("qwen3_5", "qwen3_coder", "<think>"),
        ("glm4", "glm47", "<think>"),
        ("mistral", "mistral", None),
        ("harmony", None, None),
        ("llama3", None, None),
        ("gemma3", None, None),
    ],
)
def test_mlx_lm_finds_each_familys_marks_by_itself(
    name: str, parser: str | None, thinking: str | None
) -> None:
    tokenizer = family(name).tokenizer
    module = tokenizer.tool_parser.__module__ if tokenizer.tool_parser else None
    assert module == (parser and f"mlx_lm.tool_parsers.{parser}")
    assert tokenizer.think_start == thinking


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
    parts = read("harmony", "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes", True)
    assert parts == AnswerParts("Hm.", "Yes")


# ---------------------------------------------------------------- what the templates do


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma3"])
def test_ten_turns_of_a_tool_conversation_render(name: str) -> None:
    each = family(name)
    messages = [*conversation(each, 10), QUESTION]
    prompt = each.render(messages, TOOLS)
    for turn in range(10):
        assert f"Question {turn}?" in prompt and f"Answer {turn}." in prompt
        assert f"Result {call_id(2 * turn)}." in prompt


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("qwen3", '"arguments": {"path": "7.py", "limit": 7, "range": {"lines": [7]}}}'),
        ("qwen3_5", '<parameter=limit>\n7\n</parameter>\n<parameter=range>\n{"lines": [7]}\n'),
        ("glm4", '</arg_value>\n<arg_key>range</arg_key>\n<arg_value>{"lines": [7]}</arg_value>'),
        ("harmony", 'json<|message|>{"path": "7.py", "limit": 7, "range": {"lines": [7]}}<|call|>'),
        ("llama3", '"parameters": {"path": "7.py", "limit": 7, "range": {"lines": [7]}}}'),
        ("mistral", '"arguments": {"path": "7.py", "limit": 7, "range": {"lines": [7]}}, "id": '),
    ],
)
def test_arguments_reach_the_template_as_objects(name: str, shown: str) -> None:
    each = family(name)
    assert shown in each.render([*conversation(each, 10), QUESTION], TOOLS)


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


# ---------------------------------------------------------------- think blocks


@pytest.mark.parametrize(
    ("text", "is_thinking", "parts"),
    [
        ("<think>\nwhy\n</think>\n\nanswer", False, AnswerParts("why", "answer")),
        ("\n<think>why</think>\nanswer", False, AnswerParts("why", "answer")),
        ("why\n</think>\n\nanswer", True, AnswerParts("why", "answer")),
        ("why\n</think>\n\nanswer", False, AnswerParts("", "why\nanswer")),  # nobody opened it
        ("<think>\nwhy</think>answer", True, AnswerParts("why", "answer")),  # opened twice
        ("<think>\n\n</think>\n\nanswer", False, AnswerParts("", "answer")),
        ("<think>\nwhy, and then", False, AnswerParts("why, and then")),
        ("why, and then", True, AnswerParts("why, and then")),
        ("<think>why</think>\n\n  indented\n", False, AnswerParts("why", "  indented\n")),
        ("<think> why \n b </think> x", False, AnswerParts(" why \n b ", " x")),
        ("\n answer \n", False, AnswerParts("", "\n answer \n")),
        ("a <think> b </think> c", False, AnswerParts("", "a <think> b </think> c")),
        ("<think>a</think>b</think>c", False, AnswerParts("a", "bc")),
        (f"<think>{CALL_TEXT}</think>no", False, AnswerParts(CALL_TEXT, "no")),
        (f"why\n{CALL_TEXT}", True, AnswerParts("why", "", (CALL,))),
        (f"why\n{CALL_TEXT}\n</think>\n", True, AnswerParts("why", "", (CALL,))),
        (f"why {CALL_TEXT} so</think>no", True, AnswerParts(f"why {CALL_TEXT} so", "no")),
        (f"`{CALL_TEXT}`", True, AnswerParts(f"`{CALL_TEXT}`")),
        ("", False, AnswerParts()),
        ("", True, AnswerParts()),
    ],
)
def test_a_think_block_is_what_the_text_begins_with(
    text: str, is_thinking: bool, parts: AnswerParts
) -> None:
    assert read("qwen3", text, is_thinking) == parts


def test_a_closing_mark_that_a_call_quotes_closes_nothing() -> None:
    call = ToolCall("write", {"text": "a</think>b"})
    assert read("qwen3", family("qwen3").written(AnswerParts(calls=(call,)))) == AnswerParts(
        calls=(call,)
    )


def test_a_family_without_a_think_block_has_no_reasoning() -> None:
    assert read("llama3", "<think>a</think>b", True) == AnswerParts("", "<think>a</think>b")


# ---------------------------------------------------------------- calls between marks


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"Let me see.\n{CALL_TEXT}", "Let me see."),
        (f"\n\n{CALL_TEXT}\n", ""),
        (f"{CALL_TEXT}\n\nDone. ", "Done. "),
        (f"\n{CALL_TEXT}\nDone.", "Done."),
        (f"  Let me see.\n\n{CALL_TEXT}\nDone.", "  Let me see.\n\nDone."),
        (f"Let me see.{CALL_TEXT}\n Done.", "Let me see.\n Done."),
        (f"A {CALL_TEXT}\n{CALL_TEXT}\n B {CALL_TEXT} ", "A B"),
    ],
)
def test_text_around_calls_is_content_and_blanks_that_set_calls_apart_are_not(
    text: str, content: str
) -> None:
    parts = read("qwen3", text)
    assert parts == AnswerParts("", content, (CALL,) * text.count("</tool_call>"))


@pytest.mark.parametrize(
    "body",
    [
        "",
        " \n",
        "not json",
        '{"name": "read_file", "arguments": [1]}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"arguments": {}}',
        "[1]",
        "[" * 50_000,
    ],
)
def test_what_does_not_parse_stays_content_as_written(body: str) -> None:
    text = f"A\n<tool_call>{body}</tool_call>\nB"
    assert read("qwen3", text) == AnswerParts("", text)
    assert read("qwen3", f"{text}\n{CALL_TEXT}") == AnswerParts("", text, (CALL,))
    assert read("qwen3", f"<tool_call>{body}") == AnswerParts("", f"<tool_call>{body}")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (', "arguments": null', {}),
        (', "arguments": ""', {}),
        ("", {}),
        (', "arguments": "{\\"a\\": 1}"', {"a": 1}),
        (', "arguments": "[1]"', "[1]"),
        (', "arguments": "ls -l"', "ls -l"),
        (', "parameters": {"a": 1}', {"a": 1}),
    ],
)
def test_arguments_become_an_object_where_they_can(written: str, arguments: Any) -> None:
    text = f'<tool_call>{{"name": " f "{written}}}</tool_call>'
    assert read("qwen3", text) == AnswerParts(calls=(ToolCall("f", arguments),))


def test_a_call_may_lack_its_end_at_the_end_or_before_the_next() -> None:
    open_call = CALL_TEXT.removesuffix("</tool_call>")
    assert read("qwen3", open_call) == AnswerParts(calls=(CALL,))
    assert read("qwen3", open_call + open_call + CALL_TEXT) == AnswerParts(calls=(CALL,) * 3)
    assert read("qwen3", open_call + "and so on") == AnswerParts("", "and so on", (CALL,))
    xml = "<tool_call>\n<function=list_dir>\n<parameter=path>\nx\n</parameter>\n</function>\n"
    call = ToolCall("list_dir", {"path": "x"})
    assert read("qwen3_5", xml) == AnswerParts(calls=(call,))
    assert read("qwen3_5", f"{xml}{xml}</tool_call>") == AnswerParts(calls=(call, call))


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


@pytest.mark.parametrize("end", ["", "</tool_call>", "</tool_call>\n"])
def test_the_last_argument_may_lack_its_end(end: str) -> None:
    text = f"<tool_call>list_dir\n<arg_key>path</arg_key>\n<arg_value>src{end}"
    assert read("glm4", text) == AnswerParts(calls=(ToolCall("list_dir", {"path": "src"}),))


def test_arguments_take_the_types_of_the_schema() -> None:
    xml = "<tool_call>\n<function=read_file>\n<parameter={}>\n{}\n</parameter>\n</function>\n"
    for name, text, value in [("path", "3", "3"), ("limit", "3", 3), ("range", "{}", {})]:
        parts = read("qwen3_5", xml.format(name, text))
        assert parts.calls == (ToolCall("read_file", {name: value}),)
    assert family("qwen3_5").reader.read(xml.format("limit", "3"), False, []).calls == (
        ToolCall("read_file", {"limit": "3"}),
    )


@pytest.mark.parametrize("text", ["(1, {2})", "b'x'", "{3}", "1j", "..."])
def test_arguments_are_json_whatever_literal_a_parser_reads(text: str) -> None:
    value = f"<arg_key>k</arg_key>\n<arg_value>{text}</arg_value>"
    (call,) = read("glm4", f"<tool_call>f\n{value}\n</tool_call>").calls
    assert json.loads(json.dumps(call.arguments)) == call.arguments
    assert call.name == "f" and set(call.arguments) == {"k"}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[TOOL_CALLS]read_file[ARGS]{"path": "a.py"}', AnswerParts(calls=(CALL,))),
        ('A[TOOL_CALLS]read_file[ARGS]{"path": "a.py"}\nB', AnswerParts("", "A\nB", (CALL,))),
        (
            '[TOOL_CALLS]read_file[ARGS]{"path": "a.py"}[TOOL_CALLS]f[ARGS]{}',
            AnswerParts(calls=(CALL, ToolCall("f", {}))),
        ),
        (
            '[TOOL_CALLS]read_file[ARGS]{"path": "a.py"}[TOOL_CALLS]f[ARGS]{"a',
            AnswerParts("", '[TOOL_CALLS]f[ARGS]{"a', (CALL,)),
        ),
        (
            '[TOOL_CALLS] [{"name": "read_file", "arguments": "{\\"path\\": \\"a.py\\"}"}] B',
            AnswerParts("", "B", (CALL,)),
        ),
        (
            '[TOOL_CALLS]f[TOOL_CALLS]read_file[ARGS]{"path": "a.py"}',
            AnswerParts("", "[TOOL_CALLS]f", (CALL,)),
        ),
        ("[TOOL_CALLS]read_file", AnswerParts("", "[TOOL_CALLS]read_file")),
    ],
)
def test_mistral_calls_need_no_end_mark(text: str, parts: AnswerParts) -> None:
    assert read("mistral", text) == parts


# ---------------------------------------------------------------- calls without marks


def test_a_bare_object_is_a_call_only_where_it_names_a_tool_of_the_request() -> None:
    text = '{"name": "read_file", "parameters": {"path": "a.py"}}'
    assert read("llama3", text) == AnswerParts(calls=(CALL,))
    assert read("llama3", f"<|python_tag|>{text}\n") == AnswerParts(calls=(CALL,))
    assert read("llama3", f"{text}.") == AnswerParts("", ".", (CALL,))
    for other in (text.replace("read_file", "f"), f"So: {text}", '{"a": 1}', "[1]", "{"):
        assert read("llama3", other) == AnswerParts("", other)
    assert family("llama3").reader.read(text, False, []) == AnswerParts("", text)
