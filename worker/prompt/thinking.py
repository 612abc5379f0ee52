"""Thinking that a client left in the content of an assistant message is set apart again."""

from typing import Any


def with_thinking_apart(message: dict[str, Any], start: str, end: str) -> dict[str, Any]:
    """Return the message with a leading think block, if it has one, as its `reasoning_content`.

    Content yields no control tokens, so a block that stayed there would reach the model as plain
    text. `start` and `end` are the model's tags; the opening one may be missing, since templates
    put it in the generation prompt.
    """
    content = message.get("content")
    if message["role"] != "assistant" or message.get("reasoning_content") or not end:
        return message
    if not isinstance(content, str) or end not in content:
        return message
    thinking, _, rest = content.partition(end)
    before, found, inner = thinking.partition(start) if start else ("", "", thinking)
    if found and before.strip():
        return message  # a tag amid the text is a quotation
    reasoning = inner if found else thinking
    return {**message, "reasoning_content": reasoning.strip("\n"), "content": rest.lstrip("\n")}
