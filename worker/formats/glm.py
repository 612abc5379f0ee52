"""The form of GLM-4.5 to 5, Spark 2.5 and Laguna: `<tool_call>f<arg_key>k</arg_key>`."""

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    bare_form,
    tagged,
)

FORM = bare_form("<tool_call>", "arg_key", "arg_value", "</tool_call>")
FORMATS = (
    ModelFormat(
        is_of=lambda words: "<arg_key>" in words.template,
        leaves_thinking_open=True,
        sections=(Section("<tool_call>", "</tool_call>"),),
        form=FORM,
        grammar=CallGrammar(tagged(FORM), "<tool_call>"),
    ),
)
