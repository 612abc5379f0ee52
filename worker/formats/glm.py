"""The forms of GLM; that of 4.5 to 5 is also that of Spark 2.5, Laguna, LongCat, IQuest and Hy."""

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

HY = "<tool_call:"  # a suffix follows that differs by checkpoint


def _hy(words: ModelWords) -> ModelFormat:
    """Return Hy3's or Hy4's with the marks of the vocabulary; only Hy3 has one behind a name."""
    start = next(each for each in words.vocabulary if each.startswith(HY))
    suffix = start.removeprefix("<tool_call").removesuffix(">")
    end, sections_end, behind_name = (
        f"<{each}{suffix}>" for each in ("/tool_call", "/tool_calls", "tool_sep")
    )
    form = bare_form(start, f"arg_key{suffix}", f"arg_value{suffix}", end)
    line = "\n" if behind_name in words.vocabulary else ""
    form = replace(
        form,
        name=(start, f"{behind_name}\n") if line else form.name,
        head=regex.compile(rf"{form.head.pattern}(?:\s*+{behind_name}|(?=\s*+<[/a]))"),
    )
    sections = f"<tool_calls{suffix}>"
    return ModelFormat(
        is_of=lambda words: True,
        thinking=(f"<think{suffix}>", f"</think{suffix}>"),
        framing=(sections, sections_end),
        sections=(Section(start, end),),
        form=form,
        grammar=CallGrammar(tagged(form), start, start=sections + line, end=line + sections_end),
    )


def _bare(tag: str, key: str, value: str, shown: str = "", **more: Any) -> ModelFormat:
    """Return the form whose elements have these names, known by what templates have `shown`."""
    form = bare_form(f"<{tag}>", key, value, f"</{tag}>")
    return ModelFormat(
        is_of=lambda words: (shown or f"<{tag}>") in words.template,
        sections=(Section(f"<{tag}>", f"</{tag}>"),),
        form=form,
        grammar=CallGrammar(tagged(form), f"<{tag}>"),
        **more,
    )


def _read(context: CallContext) -> ParserSteps[None]:
    """Read the call whose name stands here, if a line begins with it."""
    buffer, name = context.buffer, context.section.start.removesuffix("\n{")
    if buffer.before(0) not in ("", "\n", ">"):
        raise UnreadableOutput
    buffer.at += len(name)
    yield from named_call(context, name)


GLM_4 = ModelFormat(  # 0414: a tool's name on a line, JSON below, and no mark
    is_of=lambda words: "<|observation|>" in words.template and "[gMASK]" in words.template,
    rank=2,
    framing=("<|assistant|>",),
    part_ends=("<|assistant|>",),
    sections=(Section("\n{", read=_read, is_head=True, is_behind_name=True),),
    grammar=CallGrammar(json_call("", "\n", ""), "", between="<|assistant|>"),
)
FORMATS = (
    GLM_4,
    replace(  # Z1
        GLM_4,
        is_of=lambda words: GLM_4.is_of(words) and "<think>" in words.template,
        rank=1,
        thinking=("<think>", "</think>"),
    ),
    _bare("tool_call", "arg_key", "arg_value", "<arg_key>", leaves_thinking_open=True),
    _bare("longcat_tool_call", "longcat_arg_key", "longcat_arg_value"),
    _bare("iquest_tool_call", "arg_key", "arg_value", rank=-1),  # its keys are GLM's
    ModelFormat(
        is_of=lambda words: any(each.startswith(HY) for each in words.vocabulary), of_words=_hy
    ),
)
