"""The formats of GLM; Spark 2.5, Laguna, LongCat, IQuest and Hy share the format of 4.5 to 5."""

from dataclasses import replace
from typing import Any

import regex

from hearth.worker.formats.shared.format_parts import (
    CallContext,
    CallGrammar,
    ModelFormat,
    ModelWords,
    ParserSteps,
    Section,
    UnreadableOutput,
    bare_form,
    json_call,
    named_call,
    tagged,
)

HY = "<tool_call:"  # a suffix follows, which differs between checkpoints


def _hy(words: ModelWords) -> ModelFormat:
    """Return the format of Hy3 or Hy4 with the vocabulary's marks; only Hy3 marks a name's end."""
    start = next(word for word in words.vocabulary if word.startswith(HY))
    suffix = start.removeprefix("<tool_call").removesuffix(">")
    end, sections_end, name_end = (
        f"<{tag}{suffix}>" for tag in ("/tool_call", "/tool_calls", "tool_sep")
    )
    form = bare_form(start, f"arg_key{suffix}", f"arg_value{suffix}", end)
    line = "\n" if name_end in words.vocabulary else ""
    form = replace(
        form,
        name=(start, f"{name_end}\n") if line else form.name,
        head=regex.compile(rf"{form.head.pattern}(?:\s*+{name_end}|(?=\s*+<[/a]))"),
    )
    sections = f"<tool_calls{suffix}>"
    return ModelFormat(
        matches=lambda words: True,
        thinking=(f"<think{suffix}>", f"</think{suffix}>"),
        framing=(sections, sections_end),
        sections=(Section(start, end),),
        form=form,
        grammar=CallGrammar(tagged(form), start, start=sections + line, end=line + sections_end),
    )


def _bare(tag: str, key: str, value: str, shown: str = "", **more: Any) -> ModelFormat:
    """Return the format with elements of these names; `shown` is the text in its templates."""
    form = bare_form(f"<{tag}>", key, value, f"</{tag}>")
    return ModelFormat(
        matches=lambda words: (shown or f"<{tag}>") in words.template,
        sections=(Section(f"<{tag}>", f"</{tag}>"),),
        form=form,
        grammar=CallGrammar(tagged(form), f"<{tag}>"),
        **more,
    )


def _read(context: CallContext) -> ParserSteps[None]:
    """Read the call of the name that stands here, if the name begins a line."""
    buffer, name = context.buffer, context.section.start.removesuffix("\n{")
    if buffer.char_before(0) not in ("", "\n", ">"):
        raise UnreadableOutput
    buffer.at += len(name)
    yield from named_call(context, name)


GLM_4 = ModelFormat(  # 0414: a tool's name on a line, JSON on the next, and no mark
    matches=lambda words: "<|observation|>" in words.template and "[gMASK]" in words.template,
    rank=2,
    framing=("<|assistant|>",),
    part_ends=("<|assistant|>",),
    sections=(Section("\n{", read=_read, is_head=True, follows_name=True),),
    grammar=CallGrammar(json_call("", "\n", ""), "", between="<|assistant|>"),
)
FORMATS = (
    GLM_4,
    replace(  # Z1
        GLM_4,
        matches=lambda words: GLM_4.matches(words) and "<think>" in words.template,
        rank=1,
        thinking=("<think>", "</think>"),
    ),
    _bare("tool_call", "arg_key", "arg_value", "<arg_key>", leaves_thinking_open=True),
    _bare("longcat_tool_call", "longcat_arg_key", "longcat_arg_value"),
    _bare("iquest_tool_call", "arg_key", "arg_value", rank=-1),  # keys and values named as GLM's
    ModelFormat(
        matches=lambda words: any(word.startswith(HY) for word in words.vocabulary), for_model=_hy
    ),
)
