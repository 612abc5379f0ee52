"""Answers in the harmony format of gpt-oss: whom a message is for, and on which channel it is."""

import pytest

from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.model_families import family, tools_for

CALL = ToolCall("read_file", {"path": "a.py"})


def read(text: str) -> AnswerParts:
    return family("harmony").reader.read(text, False, tools_for([CALL]))


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.read_file <|constrain|>json",
        "<|channel|>commentary to=functions.read_file<|constrain|>json",
        "<|channel|>commentary to=functions.read_file json",
        " to=functions.read_file<|channel|>commentary json",
        " to=functions.read_file<|channel|>commentary",
        "<|channel|>analysis to=functions.read_file code",
        "<|channel|>commentary to=read_file",
    ],
)
def test_a_harmony_recipient_may_stand_in_either_header(header: str) -> None:
    body = '<|message|>{"path": "a.py"}'
    assert read(header + body) == AnswerParts(calls=(CALL,))
    analysis = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
    assert read(analysis + header + body) == AnswerParts("why", "", (CALL,))
    twice = f"{header}{body}<|call|><|start|>assistant{header}{body}<|call|>"
    assert read(twice) == AnswerParts(calls=(CALL, CALL))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<|channel|>final<|message|> One.\n", AnswerParts("", " One.\n")),
        ("<|channel|>commentary<|message|>Let me see.", AnswerParts("", "Let me see.")),
        ("<|channel|>commentary to=user<|message|>Let me see.", AnswerParts("", "Let me see.")),
        ("<|channel|>analysis to=python code<|message|>1 + 1", AnswerParts("1 + 1")),
        ("<|channel|>analysis<|message|>why<|end|><|start|>assistant<|chan", AnswerParts("why")),
        ("<|channel|>analysis<|message|>why<|end|><|start|>assistant", AnswerParts("why")),
        ("<|channel|>analysis", AnswerParts()),
        (" plain text ", AnswerParts("", " plain text ")),
        (
            "<|channel|>final<|message|>a<|end|>\n<|start|>assistant<|channel|>final<|message|>b",
            AnswerParts("", "a\nb"),
        ),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>"
            "b<|end|><|start|>assistant<|channel|>commentary<|message|>c<|end|><|start|>assistant"
            "<|channel|>final<|message|>d",
            AnswerParts("a\nb", "c\nd"),
        ),
        (
            '<|channel|>commentary to=functions.f<|message|>{"a',
            AnswerParts(calls=(ToolCall("f", {}),)),
        ),
        (
            "<|channel|>commentary to=functions.f<|message|>",
            AnswerParts(calls=(ToolCall("f", {}),)),
        ),
        (
            "<|channel|>commentary to=functions.f<|message|>[1]",
            AnswerParts(calls=(ToolCall("f", "[1]"),)),
        ),
    ],
)
def test_harmony_channels_tell_what_a_message_is(text: str, parts: AnswerParts) -> None:
    assert read(text) == parts
