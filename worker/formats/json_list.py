"""The forms of calls as JSON between two marks, where the marks alone tell families apart."""

import json
from collections.abc import Callable
from typing import Any, Final

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    ModelWords,
    Section,
    json_call,
)

_THINK: Final = ("<think>", "</think>")
_CALLS: Final = ("<tool_calls>", "</tool_calls>")
_FINAL: Final = "[BEGIN FINAL RESPONSE]"  # of Apriel, behind its thinking


def _format(
    is_of: Callable[[ModelWords], bool],
    marks: tuple[str, str],
    around: tuple[str, str, str] = ("[", ", ", "]"),
    key: str = "arguments",
    **more: Any,
) -> ModelFormat:
    """Return the form of calls between `marks`, with `around` them what makes them a list."""
    start, end = marks

    def call_text(name: str, arguments: Any) -> str:
        call = json.dumps({"name": name, key: arguments}, ensure_ascii=False)
        return f"{start}{around[0]}{call}{around[2]}{end}"

    return ModelFormat(
        is_of=is_of,
        sections=(Section(start, end),),
        grammar=CallGrammar(
            json_call('{"name": "', f'", "{key}": ', "}"),
            start,
            start=f"{start}{around[0]}",
            end=f"{around[2]}{end}",
            between=around[1],
        ),
        call_text=call_text,
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
    ),
    _format(  # Granite 3
        lambda words: "<|tool_call|>" in words.template,
        ("<|tool_call|>", ""),
        rank=1,
        thinking=_THINK,
        framing=("<response>", "</response>"),
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
        lambda words: "<tool_calls>" in words.template and _FINAL in words.vocabulary,
        _CALLS,
        thinking=("Here are my reasoning steps:", _FINAL),
    ),
    _format(  # Apriel 1.5
        lambda words: "<tool_calls>" in words.template and "<thinking>" in words.template,
        _CALLS,
        rank=1,
        thinking=("<thinking>", "</thinking>"),
    ),
    _format(  # Hunyuan A13B
        lambda words: "<tool_calls>" in words.template,
        _CALLS,
        rank=2,
        thinking=_THINK,
        framing=("<answer>", "</answer>"),
    ),
    _format(  # InternLM
        lambda words: words.vocabulary >= {"<|action_start|>", "<|plugin|>"},
        ("<|action_start|><|plugin|>", "<|action_end|>"),
        ("\n", "<|action_end|><|action_start|><|plugin|>\n", ""),
        key="parameters",
    ),
    ModelFormat(  # xLAM 2
        is_of=lambda words: "tool_call_name" in words.template,
        sections=(Section('[{"name"', is_own=False, is_head=True),),
        grammar=CallGrammar(
            json_call('{"name": "', '", "arguments": ', "}"),
            '[{"name": "',
            start="[",
            end="]",
            between=", ",
        ),
    ),
)
