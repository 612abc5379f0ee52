"""Moves thinking that a client left in an assistant message's content to a field of its own."""

from typing import Any


def with_thinking_extracted(
    message: dict[str, Any], start: str, end: str, is_opened: bool = True
) -> dict[str, Any]:
    """Return the message with a leading think block, if it has one, as its `reasoning_content`.

    Content yields no control tokens, so a block that stayed there would reach the model as plain
    text. `start` and `end` are the model's tags; the opening one may be missing where the
    template puts it in the generation prompt (`is_opened`). A block that repeats
    `reasoning_content` is dropped.
    """
    content = message.get("content")
    if message["role"] != "assistant" or not end:
        return message
    if not isinstance(content, str) or end not in content:
        return message
    thinking, _, rest = content.partition(end)
    before, found, inner = thinking.partition(start) if start else ("", "", thinking)
    if before.strip() if found else not is_opened:
        return message  # a tag amid the text is a quotation
    reasoning = (inner if found else thinking).strip("\n")
    known = message.get("reasoning_content") or reasoning
    if known.strip() != reasoning.strip():
        return message
    return {**message, "reasoning_content": known, "content": rest.lstrip("\n")}
