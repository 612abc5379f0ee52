"""The content of a message in OpenAI's two dialects: a string, or parts that are text."""

from typing import Any, Final

from proxy.dialects import fields, tools

_TEXT_PARTS: Final = frozenset(("text", "input_text", "output_text"))


def content_text(content: Any, param: str, *, untyped: str = "") -> str:
    """Return `content` as one string; a part without a type is of type `untyped`.

    Raises:
        RequestError: it is neither a string nor a list of text parts.
    """
    if type(content) is str:
        return content
    if type(content) is not list:
        fields.refuse(param, content, "a string or a list of parts")
    texts = [_part(value, f"{param}[{index}]", untyped) for index, value in enumerate(content)]
    return join_text(texts)


def _part(value: Any, param: str, untyped: str) -> str:
    row = fields.record(value, param)
    kind = fields.text(row, "type", f"{param}.type") or untyped
    if kind in _TEXT_PARTS:
        found = fields.text(row, "text", f"{param}.text")
        return found if found is not None else fields.refuse(f"{param}.text", None, "a string")
    if kind == "refusal":
        return fields.text(row, "refusal", f"{param}.refusal") or ""
    tools.refuse_images(param, kind)
    fields.refuse(f"{param}.type", kind, "text, input_text or output_text")


def join_text(parts: list[str]) -> str:
    """Return text parts as the one string that chat templates read, each on its own line."""
    return "\n".join(parts)
