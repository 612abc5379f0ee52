"""The formats of Gemma 4 and FunctionGemma: marks stand around `call:f{key:value}` and strings."""

from hearth.worker.formats.shared.format_parts import BareKeys, CallGrammar, ModelFormat, Section

START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
FUNCTION_START, FUNCTION_END = "<start_function_call>", "<end_function_call>"
FORMATS = (
    ModelFormat(
        matches=lambda words: START in words.template and END in words.template,
        ends=("<|tool_response>",),
        sections=(Section(START, END, quote=QUOTE),),
        grammar=CallGrammar(BareKeys(START, END, QUOTE, nests=True), START),
    ),
    ModelFormat(  # FunctionGemma, which has no arrays or objects in arguments
        matches=lambda words: FUNCTION_START in words.template,
        ends=("<start_function_response>",),
        sections=(Section(FUNCTION_START, FUNCTION_END, quote="<escape>"),),
        grammar=CallGrammar(
            BareKeys(FUNCTION_START, FUNCTION_END, "<escape>", nests=False), FUNCTION_START
        ),
    ),
)
