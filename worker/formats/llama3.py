"""The formats of Llama 3 and 4: an object in JSON, maybe after a tag, or Python after the tag."""

from dataclasses import replace
from typing import Final

from hearth.worker.formats.shared.format_parts import (
    BLANKS,
    LAST,
    CallContext,
    CallGrammar,
    Marks,
    ModelFormat,
    ParserSteps,
    Section,
    Trust,
    UnreadableOutput,
    json_call,
    json_calls,
    python_calls,
)

TAG: Final = "<|python_tag|>"
FRAME: Final = ("<|python_start|>", "<|python_end|>")


def read(context: CallContext) -> ParserSteps[None]:
    """Read the calls after the tag: JSON, or Python up to the end."""
    buffer = context.buffer
    yield from buffer.skip(BLANKS)
    if (yield from buffer.peek()) == "{":
        yield from json_calls(context, Trust(any_name=False))
        return
    text, _ = yield from buffer.text_up_to(Marks())
    calls = python_calls(text, context.tools) if buffer.is_complete else []
    if not calls:
        raise UnreadableOutput
    for call in calls:
        context.write(*call)


SECTION = Section(TAG, read=read, takes_any_name=False)
_BARE: Final = ModelFormat(
    matches=lambda words: words.tool_form == "native",
    rank=LAST + 1,
    ends=("<|eom_id|>",),
    sections=(SECTION,),
    grammar=CallGrammar(
        json_call('{"name": "', '", "parameters": ', "}"), '{"name": "', is_single=True
    ),
)
FORMATS = (
    _BARE,
    replace(  # Llama 4 frames its calls, or the text before them
        _BARE,
        matches=lambda words: words.vocabulary >= {*FRAME},
        rank=LAST,
        framing=FRAME,
        sections=(Section(*FRAME, takes_any_name=False),),
    ),
)
