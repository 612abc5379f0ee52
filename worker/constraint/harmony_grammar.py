"""Writes grammars of harmony turns (gpt-oss): free thinking, then the message that is asked for."""

from collections.abc import Sequence
from typing import Final

from hearth.worker.constraint.call_grammars import json_arguments
from hearth.worker.constraint.json_schemas import ToolSchema
from hearth.worker.constraint.lark_builder import NOTHING, TEXT, Expression, Lark
from hearth.worker.stream import harmony_parser

NEXT: Final = "<|end|><|start|>assistant"
RECIPIENT: Final = " to=functions."
TYPE: Final = (" <|constrain|>json", "<|constrain|>json", " json")


def final_message(lark: Lark, answer: Expression) -> Expression:
    """Return the message whose text is `answer`."""
    kind = lark.any_of([*TYPE, NOTHING])
    return lark.row(f"{harmony_parser.CHANNEL}final", kind, harmony_parser.MESSAGE, answer)


def call_message(lark: Lark, tools: Sequence[ToolSchema]) -> Expression:
    """Return the message that calls one of the tools."""
    assert tools, "a call needs a tool"
    return lark.any_of([_call(lark, tool) for tool in tools])


def addressed_call(lark: Lark, tools: Sequence[ToolSchema]) -> Expression:
    """Return a call from its recipient on, wherever in the header that stands."""
    assert tools, "a call needs a tool"
    kind = lark.any_of([*TYPE, NOTHING])
    channel = lark.optional(f"{harmony_parser.CHANNEL}commentary")
    behind = lark.rule(lark.row(channel, kind, harmony_parser.MESSAGE))
    calls = [lark.row(lark.quoted(each.name), behind, json_arguments(lark, each)) for each in tools]
    return lark.row(RECIPIENT, lark.any_of(calls))


def _call(lark: Lark, tool: ToolSchema) -> Expression:
    kind = lark.any_of([*TYPE, NOTHING])
    recipient = lark.row(RECIPIENT, lark.quoted(tool.name))
    channel = f"{harmony_parser.CHANNEL}commentary"
    header = lark.any_of([lark.row(channel, recipient), lark.row(recipient, channel)])
    return lark.row(header, kind, harmony_parser.MESSAGE, json_arguments(lark, tool))


def turn(lark: Lark, last: Expression, opening: str) -> Expression:
    """Return a turn that ends with `last`, with nothing but thinking in front of it.

    `opening` is the generation prompt, which may have begun the thinking.
    """
    thinking = lark.repeated(harmony_parser.ANALYSIS, lark.optional(TEXT), NEXT)
    if opening.endswith(harmony_parser.ANALYSIS):
        return lark.row(lark.optional(TEXT), NEXT, thinking, last)
    return lark.row(thinking, last)
