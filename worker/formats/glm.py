"""The form of GLM-4.5 to 5, Spark 2.5, Laguna, LongCat, Hy: `<tool_call>f<arg_key>k</arg_key>`."""

from dataclasses import replace

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    ModelWords,
    Section,
    bare_form,
    tagged,
)

FORM = bare_form("<tool_call>", "arg_key", "arg_value", "</tool_call>")
START, END = "<longcat_tool_call>", "</longcat_tool_call>"
LONGCAT = bare_form(START, "longcat_arg_key", "longcat_arg_value", END)
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


FORMATS = (
    ModelFormat(
        is_of=lambda words: "<arg_key>" in words.template,
        leaves_thinking_open=True,
        sections=(Section("<tool_call>", "</tool_call>"),),
        form=FORM,
        grammar=CallGrammar(tagged(FORM), "<tool_call>"),
    ),
    ModelFormat(
        is_of=lambda words: START in words.template,
        sections=(Section(START, END),),
        form=LONGCAT,
        grammar=CallGrammar(tagged(LONGCAT), START),
    ),
    ModelFormat(
        is_of=lambda words: any(each.startswith(HY) for each in words.vocabulary), of_words=_hy
    ),
)
