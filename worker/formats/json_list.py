"""The formats of calls as JSON between two marks; families differ in their marks alone."""

from collections.abc import Callable
from typing import Any, Final

import regex

from hearth.worker.formats.shared.format_parts import (
    LAST,
    CallGrammar,
    ModelFormat,
    ModelWords,
    Section,
    Trust,
    json_call,
    json_call_text,
    json_calls,
)

_THINK: Final = ("<think>", "</think>")
_CALL: Final = ("<tool_call>", "</tool_call>")
_STEPS: Final = ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")
_MESSAGE: Final = ("<|message_sep|>",)
_GIGACHAT: Final = tuple(
    Section(start, *_MESSAGE) for start in ("function call<|role_sep|>", "<|function_call|>")
)
_CALLS: Final = ("<tool_calls>", "</tool_calls>")


def _format(
    matches: Callable[[ModelWords], bool],
    marks: tuple[str, str],
    around: tuple[str, str, str] = ("[", ", ", "]"),
    key: str = "arguments",
    others: tuple[str, ...] = (),
    **more: Any,
) -> ModelFormat:
    """Return the format of calls between `marks`.

    `around` is the text before, between and after calls. `others` are further texts that models
    write before calls.
    """
    start, end = marks
    call = '{"name": "', f'", "{key}": ', "}"
    return ModelFormat(
        matches=matches,
        sections=(Section(start, end), *(Section(text, takes_any_name=False) for text in others)),
        grammar=CallGrammar(
            json_call(*call),
            start,
            start=f"{start}{around[0]}",
            end=f"{around[2]}{end}",
            between=around[1],
        ),
        call_text=json_call_text(*call),
        **more,
    )


FORMATS = (
    _format(  # Nemotron Nano 2, Super 49B
        lambda words: "<TOOLCALL>" in words.template,
        ("<TOOLCALL>", "</TOOLCALL>"),
        thinking=_THINK,
    ),
    _format(  # Phi-4-mini
        lambda words: words.vocabulary >= {"<|tool_call|>", "<|/tool_call|>"},
        ("<|tool_call|>", "<|/tool_call|>"),
        framing=("<|tool_call|>", "<|/tool_call|>"),
        others=("functools",),
    ),
    _format(  # Granite 3
        lambda words: "<|tool_call|>" in words.template,
        ("<|tool_call|>", ""),
        rank=1,
        thinking=_THINK,
        framing=("<|tool_call|>",),
        edges=("<response>", "</response>"),
    ),
    _format(  # MiniMax M1
        lambda words: "<tool_calls>\n{" in words.template.replace("\\n", "\n"),
        _CALLS,
        ("\n", "\n", "\n"),
        thinking=_THINK,
    ),
    _format(  # Jamba
        lambda words: "<tool_calls>" in words.template and "<|bom|>" in words.vocabulary,
        _CALLS,
        ("[\n    ", ",\n    ", "\n]"),
    ),
    _format(  # Apriel 1.6
        lambda words: (
            "<tool_calls>" in words.template and "[BEGIN FINAL RESPONSE]" in words.vocabulary
        ),
        _CALLS,
        thinking=_STEPS,
    ),
    _format(  # Apriel 1.5
        lambda words: "<tool_calls>" in words.template and "<thinking>" in words.template,
        _CALLS,
        rank=1,
        thinking=("<thinking>", "</thinking>"),
        more_thinking=(_STEPS,),
        edges=("[END FINAL RESPONSE]",),
    ),
    _format(  # Hunyuan A13B
        lambda words: "<tool_calls>" in words.template,
        _CALLS,
        rank=2,
        thinking=_THINK,
        edges=("<answer>\n助手：", "<answer>", "</answer>"),
    ),
    _format(  # InternLM
        lambda words: words.vocabulary >= {"<|action_start|>", "<|plugin|>"},
        ("<|action_start|><|plugin|>", "<|action_end|>"),
        ("\n", "<|action_end|><|action_start|><|plugin|>\n", ""),
        key="parameters",
    ),
    _format(  # ERNIE 4.5
        lambda words: (
            "<tool_call>\n{" in words.template.replace("\\n", "\n")
            and "</response>" in words.template
        ),
        _CALL,
        ("\n", "\n</tool_call>\n\n<tool_call>\n", "\n"),
        rank=LAST - 1,
        framing=("<response>", "</response>"),
        part_ends=("</response>",),
    ),
    _format(  # Ling 2
        lambda words: "<tool_call>\n{" in words.template.replace("\\n", "\n"),
        _CALL,
        ("\n", "\n</tool_call>\n<tool_call>\n", "\n"),
        rank=LAST,
    ),
    ModelFormat(  # Apertus: the key of the arguments is the tool's name
        matches=lambda words: "<|tools_prefix|>" in words.template,
        thinking=("<|inner_prefix|>", "<|inner_suffix|>"),
        framing=("<|tools_suffix|>",),
        ends=("<|tools_suffix|>",),
        header=regex.compile(r"(?!)"),  # there are no headers, but a call ends thinking
        sections=(
            Section(
                "<|tools_prefix|>", read=lambda context: json_calls(context, Trust(is_keyed=True))
            ),
        ),
        grammar=CallGrammar(
            json_call('{"', '": ', "}"),
            "<|tools_prefix|>",
            start="<|tools_prefix|>[",
            end="]",
            between=", ",
        ),
    ),
    ModelFormat(  # GigaChat 3.1
        matches=lambda words: _GIGACHAT[1].start in words.template,
        framing=_MESSAGE,
        part_ends=_MESSAGE,
        sections=_GIGACHAT,
        grammar=CallGrammar(
            json_call('<|function_call|>{"name": "', '", "arguments": ', "}"),
            "<|function_call|>",
            is_single=True,
        ),
    ),
    ModelFormat(  # GigaChat 3: each call is a message
        matches=lambda words: (
            "function call" in words.template and "<|role_sep|>" in words.template
        ),
        rank=1,
        framing=_MESSAGE,
        part_ends=_MESSAGE,
        sections=_GIGACHAT,
        grammar=CallGrammar(
            json_call('{"name": "', '", "arguments": ', "}"),
            "function call<|role_sep|>",
            start="<|message_sep|>\n\nfunction call<|role_sep|>\n",
            is_single=True,
        ),
    ),
    ModelFormat(  # xLAM 2
        matches=lambda words: "tool_call_name" in words.template,
        more_thinking=(_THINK,),
        sections=(Section('[{"name"', takes_any_name=False, is_head=True),),
        grammar=CallGrammar(
            json_call('{"name": "', '", "arguments": ', "}"),
            '[{"name": "',
            start="[",
            end="]",
            between=", ",
        ),
    ),
)
