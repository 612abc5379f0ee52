"""The form of GLM-4-0414 and Z1: a tool's name on a line, JSON below, and no mark."""

from hearth.worker.formats.shared.format_parts import (
    CallContext,
    CallGrammar,
    ModelFormat,
    ParserSteps,
    Section,
    UnreadableOutput,
    json_call,
    named_call,
)

BEHIND_NAME = "\n{"
NEXT = "<|assistant|>"


def read(context: CallContext) -> ParserSteps[None]:
    """Read the call whose name stands here, if a line begins with it."""
    buffer, name = context.buffer, context.start.removesuffix(BEHIND_NAME)
    if buffer.before(0) not in ("", "\n", ">"):
        raise UnreadableOutput
    buffer.at += len(name)
    yield from named_call(context, name)


FORMATS = (
    ModelFormat(
        is_of=lambda words: "<|observation|>" in words.template and "[gMASK]" in words.template,
        rank=1,
        thinking=("<think>", "</think>"),
        framing=(NEXT,),
        part_ends=(NEXT,),
        sections=(Section(BEHIND_NAME, read=read, is_head=True, is_behind_name=True),),
        grammar=CallGrammar(json_call("", BEHIND_NAME[:1], ""), "", between=NEXT),
    ),
)
