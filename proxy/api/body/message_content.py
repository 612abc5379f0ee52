"""Reads the content of a message: texts, images and files in order, in OpenAI's two notations.

Images and documents are fetched and decoded later. Until then an image is a piece
{"type": "image", "url", "param"}, and a document (a PDF or a text file) is a piece
{"type": "document", "data", "param", "head"}. `param` is the path that error texts name, `data` is
base64 or a data: URL, and `head` has the lines to show above the document's text.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any, Final

import orjson

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.request.content_pieces import (
    ContentPart,
    MessageContent,
    join,
    joined_if_texts,
    text_of,
)
from hearth.shared.errors import RequestError

log = logging.getLogger(__name__)

_TEXT_PARTS: Final = frozenset(("text", "input_text", "output_text"))
_IMAGE_PARTS: Final = frozenset(("image_url", "input_image"))
_FILE_PARTS: Final = frozenset(("file", "input_file"))
_ALLOWED: Final = "text, input_text, output_text, image_url, input_image, file or input_file"
_THOUGHTS: Final = ("thinking", "reasoning", "reasoning_text")


def image(url: str, param: str) -> ContentPart:
    """Return the piece that shows the image at `url`."""
    return {"type": "image", "url": url, "param": param}


def ends_open(messages: list[Any]) -> bool:
    """Return whether the last message is an assistant's text that the answer has to continue.

    A message with tool calls is complete, and an empty text is no beginning.
    """
    return any(
        last["role"] == "assistant"
        and not last.get("tool_calls")
        and text_of(last["content"]).strip()
        for last in messages[-1:]
    )


def texts_only(pieces: list[ContentPart]) -> list[str]:
    """Return `pieces`, which must all be texts.

    Raises:
        RequestError: a piece is an image or a document.
    """
    texts = []
    for piece in pieces:
        if type(piece) is not str:
            assert isinstance(piece, dict), type(piece)
            raise RequestError(
                f"{piece['param']} is of type {piece['type']}, and those are read in user messages "
                "and in tool results only. Move it there, or remove it.",
                code="unsupported_content",
                param=piece["param"],
            )
        texts.append(piece)
    return texts


def read_content(content: Any, param: str, *, untyped: str = "") -> MessageContent:
    """Return the `content` of a role that may show images; `untyped` is a part's default type.

    Raises:
        RequestError: `content` is neither a string nor a list of texts and images.
    """
    return content if type(content) is str else join(_pieces(content, param, untyped))


def text_content(content: Any, param: str, *, untyped: str = "") -> MessageContent:
    """Return the `content` of a role that may not show images.

    Raises:
        RequestError: `content` is neither a string nor a list of text parts.
    """
    return content if type(content) is str else join(texts_only(_pieces(content, param, untyped)))


def _pieces(content: Any, param: str, untyped: str) -> list[ContentPart]:
    if type(content) is not list:
        fields.refuse(param, content, "a string or a list of parts")
    pieces: list[ContentPart] = []
    for part, where in fields.json_objects(content, param):
        kind = fields.text(part, "type", f"{where}.type") or untyped
        if kind in _IMAGE_PARTS or kind in _FILE_PARTS:
            pieces.append(_image(part, where) if kind in _IMAGE_PARTS else _file_part(part, where))
        else:
            pieces.append(_text(part, kind, where))
    return pieces


def _text(part: dict[str, Any], kind: str, param: str) -> str:
    if kind in _TEXT_PARTS:
        return fields.some_text(part, "text", f"{param}.text")
    if kind == "refusal":
        return fields.text(part, "refusal", f"{param}.refusal") or ""
    if "image" not in kind:
        refuse_media(param, kind)
    fields.refuse(f"{param}.type", kind, _ALLOWED)


def _image(part: dict[str, Any], param: str) -> ContentPart:
    """Return the image of a part; the url is inside an object in chat, but not in Responses."""
    if part.get("file_id") is not None:
        raise uploaded_file_error(f"{param}.file_id")
    where = f"{param}.image_url"
    value = part.get("image_url")
    holder = value if type(value) is dict else {"url": value}
    return image(fields.required_text(holder, "url", where), where)


def result_content(output: Any, param: str, left_out: list[str]) -> MessageContent:
    """Return the content of a tool call's result.

    A part that no model here reads is replaced by a note, and its type is added to `left_out`: a
    client cannot withdraw a result, so a refusal would end the conversation.

    Raises:
        RequestError: `output` is not a result, or has an image without a usable url.
    """
    if output is None:
        return ""
    if type(output) is dict:
        return orjson.dumps(output).decode()
    if type(output) is not list:
        return text_content(output, param)
    pieces: list[ContentPart] = []
    for part, where in fields.json_objects(output, param):
        kind = fields.text(part, "type", f"{where}.type") or ""
        file = part.get("file", part)
        data = file.get("file_data") if type(file) is dict else None
        if type(part.get("text")) is str:
            pieces.append(part["text"])
        elif kind in _IMAGE_PARTS:
            pieces.append(_image(part, where))
        elif kind in _FILE_PARTS and type(data) is str and data:
            pieces.append(_file_part(part, where))
        else:
            left_out.append(kind)
            pieces.append(omission_note(kind or "content"))
    return join(pieces)


def assistant_texts(
    content: list[Any], param: str, left_out: list[str]
) -> tuple[list[str], list[str]]:
    """Return the texts and the reasoning texts in the parts of an assistant's message.

    The type of any other part is added to `left_out`, and the part's readable texts are kept.

    Raises:
        RequestError: a part is not an object with a valid type.
    """
    texts: list[str] = []
    thoughts: list[str] = []
    for part, where in fields.json_objects(content, param):
        kind = fields.text(part, "type", f"{where}.type") or "text"
        if kind in _TEXT_PARTS or kind == "refusal":
            texts.append(_text(part, kind, where))
        elif kind in _THOUGHTS:
            values = (part.get(name) for name in ("thinking", "reasoning", "text", "summary"))
            thoughts += [text for value in values for text in readable_texts(value)]
        else:
            left_out.append(kind)
            texts += texts_only(joined_if_texts(list(readable_texts(part))))
    return texts, thoughts


# ---------------------------------------------------------------- documents


def document(data: str, param: str, *head: str | None) -> dict[str, Any]:
    """Return the piece that shows a document, with the non-empty lines of `head` above it."""
    return {
        "type": "document",
        "data": data,
        "param": param,
        "head": [line for line in head if line],
    }


def _file_part(part: dict[str, Any], param: str) -> dict[str, Any]:
    """Return the document of a part: chat has the fields inside `file`, Responses does not.

    Raises:
        RequestError: the part names an uploaded file or an address instead of holding data.
    """
    holder, where = part, param
    if part.get("file") is not None:
        where = f"{param}.file"
        holder = fields.json_object(part["file"], where)
    name = fields.text(holder, "filename", f"{where}.filename")
    if holder.get("file_data") is None:
        if holder.get("file_id") is not None:
            raise uploaded_file_error(f"{where}.file_id")
        if holder.get("file_url") is not None:
            raise document_url_error(f"{where}.file_url")
    data = fields.required_text(holder, "file_data", f"{where}.file_data")
    return document(data, f"{where}.file_data", name)


def uploaded_file_error(param: str) -> RequestError:
    """Return the error for content that names an uploaded file."""
    return RequestError(
        f"{param} names an uploaded file, and this server keeps none. Send the file itself, as a "
        "data: URL or in base64.",
        code="unsupported_content",
        param=param,
    )


def document_url_error(param: str) -> RequestError:
    """Return the error for a document that is given by its address."""
    return RequestError(
        f"{param} is an address, and this server fetches no documents. Send the document itself, "
        "in base64.",
        code="unsupported_content",
        param=param,
    )


# ---------------------------------------------------------------- content that no model here reads
#
# A client may come with a history from another provider, with hosted tools, calls and results. Such
# a request must be answered. The texts in the history are kept, everything else is left out, and
# one log line names the types that were left out.

_NAMED_MAX: Final = 20  # types in one log line
_KIND: Final = re.compile(r"(tool_choice )?[a-z][a-z0-9_]{0,59}")  # looks like a type of some API
_TEXTS: Final = ("title", "url", "text", "stdout", "stderr", "logs")
# Types whose content, such as base64, is not readable.
_OPAQUE: Final = ("base64", "file", "image_generation_call", "computer_call_output")
_HOLDERS: Final = ("content", "source", "summary", "output", "outputs", "result", "results")


def readable_texts(value: Any) -> list[str]:
    """Return the readable texts in `value`, the JSON of a type unknown to this server."""
    if type(value) is str:
        return [value] if value.strip() else []
    if type(value) is list:
        return [text for item in value for text in readable_texts(item)]
    if type(value) is not dict:
        return []
    found = [value[name] for name in _TEXTS if type(value.get(name)) is str and value[name].strip()]
    if value.get("type") == "text" and type(value.get("data")) is str:
        found.append(value["data"])
    for name in _HOLDERS:
        if value.get("type") not in _OPAQUE and name in value:
            found += readable_texts(value[name])
    return found


def log_left_out(kinds: Iterable[str]) -> None:
    """Log the types of a request's parts that this server left out."""
    named = sorted({kind if _KIND.fullmatch(kind) else "(other)" for kind in kinds})
    if named:
        log.info("left out kinds=%r", ", ".join(named[:_NAMED_MAX]))


def is_media(kind: str) -> bool:
    return "image" in kind or "audio" in kind or "video" in kind


def omission_note(kind: str) -> str:
    """Return the note that replaces content of type `kind` in a tool's result."""
    return f"[{kind.removeprefix('input_').removesuffix('_url')} omitted: no model here reads it]"


def refuse_media(param: str, kind: str) -> None:
    """Raise a RequestError if `kind` is a type of media that no model here can read."""
    if is_media(kind):
        raise RequestError(
            f"{param} is of type {kind!r}; text is read here and, by models that take them, "
            "images in this API's own form. Remove it.",
            code="unsupported_content",
            param=param,
        )
