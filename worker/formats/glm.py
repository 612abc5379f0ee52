"""The form of GLM-4.5 to 5, Spark 2.5 and Laguna: `<tool_call>f<arg_key>k</arg_key>`."""

from hearth.worker.constraint.call_grammars import CallGrammar, tagged
from hearth.worker.formats.shared.model_format import ModelFormat
from hearth.worker.stream.tool_calls.call_parser import Section
from hearth.worker.stream.tool_calls.tag_form import bare_form

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
