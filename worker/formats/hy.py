"""The forms of Hy3 and Hy4: GLM's, whose marks have a suffix that differs by checkpoint."""

from dataclasses import replace
from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    ModelWords,
    Section,
    bare_form,
    tagged,
)

START: Final = "<tool_call:"


def _is_of(words: ModelWords) -> bool:
    return any(each.startswith(START) for each in words.vocabulary)


def _format(words: ModelWords) -> ModelFormat:
    start = next(each for each in words.vocabulary if each.startswith(START))
    suffix = start.removeprefix("<tool_call")  # with the ">"
    wrapper, end, behind_name = f"<tool_calls{suffix}", f"</tool_call{suffix}", f"<tool_sep{suffix}"
    is_3 = behind_name in words.vocabulary
    form = bare_form(start, f"arg_key{suffix[:-1]}", f"arg_value{suffix[:-1]}", end)
    form = replace(
        form,
        name=(start, f"{behind_name}\n") if is_3 else form.name,
        head=regex.compile(rf"{form.head.pattern}(?:\s*+{behind_name}|(?=\s*+<[/a]))"),
    )
    line = "\n" if is_3 else ""
    return ModelFormat(
        is_of=_is_of,
        thinking=(f"<think{suffix}", f"</think{suffix}"),
        framing=(wrapper, f"</tool_calls{suffix}"),
        sections=(Section(start, end),),
        form=form,
        grammar=CallGrammar(
            tagged(form), start, start=wrapper + line, end=f"{line}</tool_calls{suffix}"
        ),
    )


FORMATS = (ModelFormat(is_of=_is_of, of_words=_format),)
