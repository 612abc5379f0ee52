"""Builds prompts with a fixture's tokenizer, and reads tokens back as text."""

from functools import cache
from typing import Any

from hearth.shared.settings import load_settings
from hearth.worker.prompt.prompt_with_sampled_turns import PromptBuilder
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.prompt.tokenise import ImageForm
from hearth.worker.setup.prompt_and_session_setup import make_builder
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.constrained_answers import end_ids
from scripts.harness.model_families import Family, family

CALL = ToolCall("read", {"path": "/a"})

SYSTEM = {"role": "system", "content": "be brief"}
ASKED = {"role": "user", "content": "fix it"}
NEXT = {"role": "user", "content": "and now"}

SPOKEN, CALLED = "an answer", "a call"


@cache
def builder(name: str, preserve: str = "true", context_tokens: int = 100_000) -> PromptBuilder:
    return builder_of(family(name), preserve, context_tokens)


def builder_of(
    each: Family, preserve: str = "true", context_tokens: int = 100_000, thinking: str = "true"
) -> PromptBuilder:
    return builder_for(
        each.tokenizer, context_tokens, PRESERVE_THINKING=preserve, DEFAULT_THINKING=thinking
    )


def builder_for(
    tokenizer: Any,
    context_tokens: int = 10_000,
    form: ImageForm | None = None,
    context_by: str = "setting",
    ends: frozenset[int] | None = None,
    **environ: str,
) -> PromptBuilder:
    """Return the builder of a worker with this tokenizer and these settings."""
    ends, marks = end_ids(tokenizer) if ends is None else ends, turn_marks(tokenizer)
    settings = load_settings(environ, None)
    return make_builder(tokenizer, marks, ends, context_tokens, settings, form, context_by)


def encoded(name: str, text: str) -> list[int]:
    return list(family(name).tokenizer.encode(text, add_special_tokens=False))


def parts_of(name: str, kind: str = SPOKEN) -> AnswerParts:
    reasoning = "I think so" if family(name).thinks else ""
    return (
        AnswerParts(reasoning, "", (CALL,))
        if kind == CALLED
        else AnswerParts(reasoning, "Well done.")
    )


def message_of(parts: AnswerParts) -> dict[str, Any]:
    """Return the answer as clients send it, in our terms."""
    call = {"id": "call00000", "type": "function"}
    function = {"name": CALL.name, "arguments": CALL.arguments}
    more: dict[str, Any] = {"reasoning_content": parts.reasoning} if parts.reasoning else {}
    if parts.calls:
        more["tool_calls"] = [{**call, "function": function}]
    return {"role": "assistant", "content": parts.content, **more}
