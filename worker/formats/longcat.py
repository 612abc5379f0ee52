"""The forms of LongCat and IQuest: GLM's, with names of their own."""

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    bare_form,
    tagged,
)


def _format(tag: str, key: str, value: str) -> ModelFormat:
    start, end = f"<{tag}>", f"</{tag}>"
    form = bare_form(start, key, value, end)
    return ModelFormat(
        is_of=lambda words: start in words.template,
        rank=-1,  # IQuest's keys are GLM's
        sections=(Section(start, end),),
        form=form,
        grammar=CallGrammar(tagged(form), start),
    )


FORMATS = (
    _format("longcat_tool_call", "longcat_arg_key", "longcat_arg_value"),
    _format("iquest_tool_call", "arg_key", "arg_value"),
)
