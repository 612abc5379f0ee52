"""However an answer is cut into pieces it says the same, and nothing is ever taken back."""

import json
import random
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from hearth.worker.stream.answer_parts import AnswerPart
from scripts.harness.model_families import FAMILIES
from tests.helpers.worker.output_formats import (
    FORMATS,
    OUTPUTS,
    PIECES,
    joined,
    outputs,
    pieces,
    read_whole,
    reader,
    streamed,
    tool,
)

FILES = sorted(path.stem for path in OUTPUTS.glob("*.jsonl"))
SPLITS = 5  # of each output


def is_beginning(parts: list[AnswerPart], whole: list[AnswerPart]) -> bool:
    """Whether `whole` goes on where `parts` stop; both joined."""
    if not parts:
        return True
    last, same = parts[-1], whole[len(parts) - 1]
    is_same_kind = (last.channel, last.name) == (same.channel, same.name)
    return (
        parts[:-1] == whole[: len(parts) - 1] and is_same_kind and same.text.startswith(last.text)
    )


@pytest.mark.parametrize("name", FILES)
def test_an_output_says_the_same_however_it_is_split(name: str) -> None:
    chance = random.Random(name)
    for output in outputs(name):
        whole = joined(streamed(output.splitter(), [output.text], output.is_complete))
        for _ in range(SPLITS):
            splitter = output.splitter()
            parts: list[AnswerPart] = []
            for piece in pieces(output.text, chance):
                parts = joined([*parts, *splitter.feed(piece)])
                assert is_beginning(parts, whole), (output.text, piece)
            assert joined([*parts, *splitter.finish(output.is_complete)]) == whole
            assert splitter.collector.parts == output.parts


@pytest.mark.parametrize("name", FILES)
def test_a_call_that_was_cut_off_does_not_look_whole(name: str) -> None:
    chance = random.Random(name)
    for output in outputs(name):
        for end in chance.sample(range(len(output.text)), min(8, len(output.text))):
            splitter = output.splitter()
            splitter.feed(output.text[:end])
            splitter.finish(is_complete=False)
            calls = splitter.collector.parts.calls
            assert len(calls) <= len(output.parts.calls)
            for call, meant in zip(calls, output.parts.calls, strict=False):
                assert call.name == meant.name
                assert call == meant or isinstance(call.arguments, str), output.text[:end]


# ---------------------------------------------------------------- any text

MARKS = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>thought", "<channel|>", "\\n"),
    *('{"name": "f", "arguments": {', '"a": "x', '"}}', '{"arguments": "{\\"a\\": 1}"', "1.50"),
    *("<|tool_call>call:f{", '<|"|>', "<tool_call|>", "<start_function_call>call:f{a:", "<escape>"),
    *("<end_function_call>", "<minimax:tool_call>", '<invoke name="f">', '<parameter name="a">'),
    *("</parameter>", "</invoke>", "</minimax:tool_call>", "<|tool_calls_section_begin|>"),
    *("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|tool_calls_section_end|>", "<longcat_tool_call>f<longcat_arg_key>a</longcat_arg_key>"),
    *("<longcat_arg_value>", "</longcat_arg_value>", "<|tool_call_start|>[f(a=", "'b'", ")]"),
    *('<function name="f">', '<param name="a">', "</param>", "</function>", "<function=f>"),
    *("<atem:function_calls>", '<atem:invoke name="f">', '<atem:parameter name="a">', "None"),
    *(
        "</atem:parameter>",
        "</atem:invoke>",
        "<|open|>tools<|sep|>",
        '<|open|>call tool="f"<|sep|>',
    ),
    *('<|open|>argument key="a"<|sep|>', "<|close|>argument<|sep|>", "<|close|>call<|sep|>"),
    *("```tool_code\n", "```", "print(f(a=1))", "```json\n", "<|START_ACTION|>", "]<]minimax[>["),
    *("<|python_tag|>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]f{"),
    *(
        "</",
        "<func",
        "<tool_call>fu",
        "nc",
        "[TOOL_CALLS]fu",
        "<longcat_tool_call>func",
        ": ",
        "'",
        "\\ud83d",
        "<|END_ACTION|>",
        "<tool_call>",
        "</tool_call>",
        "true",
    ),
]
SOUP = st.lists(st.sampled_from([*PIECES, *MARKS]), max_size=25).map("".join)
TOOLS = st.sampled_from(
    [
        [tool(("f", {"a": "string", "n": "integer"})), tool(("func", {}))],
        [tool(("f", {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}))],
        [tool(("f", {"text": "string"}))],
        [],
        [None, {}, {"function": None}, {"function": {"name": "f", "parameters": []}}, "f"],
    ]
)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=40)
def test_any_text_says_the_same_however_it_is_split(name: str, data: st.DataObject) -> None:
    text = data.draw(
        st.one_of(SOUP, st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
    )
    options: dict[str, Any] = {
        "is_thinking": data.draw(st.booleans()),
        "tools": data.draw(TOOLS),
        "takes_calls": data.draw(st.integers(0, 5)) > 0,
        "may_think": data.draw(st.booleans()),
    }
    is_complete = data.draw(st.booleans())
    first = reader(name).splitter(**options)
    whole = joined(streamed(first, [text], is_complete))
    second = reader(name).splitter(**options)
    cut = pieces(text, random.Random(data.draw(st.integers(0, 999))))
    assert joined(streamed(second, cut, is_complete)) == whole
    assert first.collector.parts == second.collector.parts
    if not options["takes_calls"]:
        assert not first.collector.parts.calls
    for part in whole:
        if part.channel == "tool_call" and is_complete and part.text.startswith("{"):
            assert isinstance(json.loads(part.text), dict)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "harmony"])
@given(text=SOUP)
@settings(max_examples=60)
def test_text_without_a_call_or_a_think_mark_is_content_as_written(name: str, text: str) -> None:
    text = text.replace("think>", "thing>").replace("THINK]", "THING]")
    parts = read_whole(reader(name), text, False, [])
    assume(not parts.calls)
    assert parts.content == text


# ---------------------------------------------------------------- in time

REPEATED = [
    *('<tool_call>{"arguments": "', '<tool_call>{"name": "f", "arguments": {"a": "', "<think>"),
    *('<tool_call>{"name": "', "<tool_call>f<arg_key>", "[TOOL_CALLS]f[ARGS]{", "```tool_code\n"),
    *("<|tool_call>call:g{a:", "<|tool_call_start|>[g(", '{"name": "f", ', "```json\n{", " \n"),
    *("<function=f>", "<tool_call><function=g><parameter=a>", "<|channel|>final<|message|>", "<"),
    *('"', "\\", "{", "}", "[", '{"a": {"a": ', "</parameter>", "<|tool_call_begin|>f:0"),
    *("<tool_call><function=</tool_call>", "<tool_call>f<arg_key></tool_call>"),
    "<|channel|>commentary to=functions.f<|message|>{<|end|>",
]


@pytest.mark.night
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "glm4", "mistral", "gemma4", "harmony"])
def test_a_model_that_repeats_itself_is_read_in_no_time(name: str) -> None:
    for piece in REPEATED:
        for start in ("", '<tool_call>{"name": "f", "arguments": {"a": "'):
            splitter = reader(name).splitter(False, [tool(("f", {"a": "string"}))])
            begun = time.process_time()
            text = start + piece * (20_000 // len(piece))
            streamed(splitter, (text[at : at + 40] for at in range(0, len(text), 40)), True)
            assert time.process_time() - begun < 1, (piece, start)


BODY = "".join(f'    line {n}: \\"x\\" < {n} and </b>\\n' for n in range(6_000))
LONG = {
    "qwen3": f'<tool_call>{{"name": "f", "arguments": {{"a": "{BODY}"}}}}</tool_call>',
    "qwen3_5": f"<tool_call><function=f><parameter=a>{BODY}</parameter></function></tool_call>",
    "glm4": f"<tool_call>f<arg_key>a</arg_key><arg_value>{BODY}</arg_value></tool_call>",
    "mistral": f'[TOOL_CALLS]f[ARGS]{{"a": "{BODY}"}}',
    "llama3": f'{{"name": "f", "parameters": {{"a": "{BODY}"}}}}',
    "harmony": f'<|channel|>commentary to=functions.f<|message|>{{"a": "{BODY}"}}',
    "gemma4": f'<|tool_call>call:f{{a:<|"|>{BODY}<|"|>}}<tool_call|>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    f'<|tool_call_argument_begin|>{{"a": "{BODY}"}}<|tool_call_end|>',
    "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="a">'
    f"{BODY}</parameter></invoke></minimax:tool_call>",
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_argument_flows_and_costs_little(name: str) -> None:
    """Of 200 KB in pieces as large as tokens, only what may be a mark is held back."""
    splitter = reader(name).splitter(False, [tool(("f", {"a": "string"}))])
    text = LONG[name]
    assert len(text) > 200_000
    begun = time.process_time()
    shown_at = [at for at in range(0, len(text), 5) if splitter.feed(text[at : at + 5])]
    splitter.finish(is_complete=True)
    assert time.process_time() - begun < 5
    assert max(after - at for at, after in pairwise([0, *shown_at, len(text)])) < 200
    (call,) = splitter.collector.parts.calls
    assert isinstance(call.arguments, dict)
    assert call.arguments["a"].count("line") == 6_000


@pytest.mark.parametrize("name", FAMILIES)
def test_prose_flows_at_once(name: str) -> None:
    splitter = reader(name).splitter(False, [])
    prefix = "<|channel|>final<|message|>" if name == "harmony" else ""
    splitter.feed(prefix + "So")
    for piece in ["x", "a < b", "[1]", "{y}", "_z_", "**"]:
        assert [part.text for part in splitter.feed(piece)] == [piece]
