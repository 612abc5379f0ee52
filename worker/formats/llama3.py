"""The form of Llama 3: an object in JSON, maybe behind a tag, or Python behind that."""

from typing import Final

from hearth.worker.constraint.call_grammars import CallGrammar, json_call
from hearth.worker.formats.shared.model_format import LAST, ModelFormat
from hearth.worker.stream.lookahead_buffer import Marks, ParserSteps, UnreadableOutput
from hearth.worker.stream.tool_calls.call_parser import BLANKS, Section
from hearth.worker.stream.tool_calls.call_writer import CallContext
from hearth.worker.stream.tool_calls.json_calls import Trust, json_calls
from hearth.worker.stream.tool_calls.python_calls import python_calls

TAG: Final = "<|python_tag|>"


def read(context: CallContext) -> ParserSteps[None]:
    """Read what stands behind the tag: JSON, or Python up to the end."""
    buffer = context.buffer
    yield from buffer.skip(BLANKS)
    if (yield from buffer.peek()) == "{":
        yield from json_calls(context, Trust(any_name=False))
        return
    texts: list[str] = []
    yield from buffer.scan(Marks(), texts.append)
    calls = python_calls("".join(texts), context.tools) if buffer.is_complete else []
    if not calls:
        raise UnreadableOutput
    buffer.release()
    context.write_all(calls)


SECTION = Section(TAG, read=read, is_own=False)
FORMATS = (
    ModelFormat(
        is_of=lambda words: words.tool_form == "native",
        rank=LAST + 1,
        sections=(SECTION,),
        grammar=CallGrammar(
            json_call('{"name": "', '", "parameters": ', "}"), '{"name": "', is_single=True
        ),
    ),
)
