"""Reads the content of a message: texts, images and files in order, in OpenAI's two notations.

An image is named until it is read: {"type": "image", "url", "param"}, where `param` is the place
that a refusal names. So is a document, a PDF or a file of text: {"type": "document", "data",
"param", "head"}, with its base64 or data: URL, and the lines that stand above its text.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any, Final

import orjson

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.request.content_pieces import ContentPart, MessageContent, as_one, join, text_of
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
    """Return whether the last one is an assistant's text, of which the answer is the rest.

    Calls are over with their marks, and nothing said is no beginning.
    """
    return any(
        last["role"] == "assistant"
        and not last.get("tool_calls")
        and text_of(last["content"]).strip()
        for last in messages[-1:]
    )


def texts_only(pieces: list[ContentPart]) -> list[str]:
    """Return `pieces` of what may show texts only.

    Raises:
        RequestError: one of them is an image or a document.
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
    """Return `content`, of who may show images; a part without a type is of type `untyped`.

    Raises:
        RequestError: it is neither a string nor a list of texts and images.
    """
    return content if type(content) is str else join(_pieces(content, param, untyped))


def text_content(content: Any, param: str, *, untyped: str = "") -> MessageContent:
    """Return the `content` of a role that may show no images.

    Raises:
        RequestError: it is neither a string nor a list of text parts.
    """
    return content if type(content) is str else join(texts_only(_pieces(content, param, untyped)))


def _pieces(content: Any, param: str, untyped: str) -> list[ContentPart]:
    if type(content) is not list:
        fields.refuse(param, content, "a string or a list of parts")
    pieces: list[ContentPart] = []
    for row, where in fields.records(content, param):
        kind = fields.text(row, "type", f"{where}.type") or untyped
        if kind in _IMAGE_PARTS or kind in _FILE_PARTS:
            pieces.append(_image(row, where) if kind in _IMAGE_PARTS else _file_part(row, where))
        else:
            pieces.append(_text(row, kind, where))
    return pieces


def _text(row: dict[str, Any], kind: str, param: str) -> str:
    if kind in _TEXT_PARTS:
        return fields.some_text(row, "text", f"{param}.text")
    if kind == "refusal":
        return fields.text(row, "refusal", f"{param}.refusal") or ""
    if "image" not in kind:
        refuse_media(param, kind)
    fields.refuse(f"{param}.type", kind, _ALLOWED)


def _image(row: dict[str, Any], param: str) -> ContentPart:
    """Return the image of a part; chat has its url in an object, Responses has it as it is."""
    if row.get("file_id") is not None:
        raise no_files(f"{param}.file_id")
    where = f"{param}.image_url"
    given = row.get("image_url")
    holder = given if type(given) is dict else {"url": given}
    return image(fields.required_text(holder, "url", where), where)


def result_content(output: Any, param: str, left_out: list[str]) -> MessageContent:
    """Return the content of a call's result: no client can take one back, so hardly any is refused.

    The types of parts that no model here reads are added to `left_out`.

    Raises:
        RequestError: it is no result at all, or an image that cannot be read.
    """
    if output is None:
        return ""
    if type(output) is dict:
        return orjson.dumps(output).decode()
    if type(output) is not list:
        return text_content(output, param)
    pieces: list[ContentPart] = []
    for part, where in fields.records(output, param):
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
            pieces.append(omitted(kind or "content"))
    return join(pieces)


def said_texts(content: list[Any], param: str, left_out: list[str]) -> tuple[list[str], list[str]]:
    """Return the texts and the thoughts in an assistant's parts; others keep what text they hold.

    Raises:
        RequestError: one of them is no part.
    """
    texts: list[str] = []
    thoughts: list[str] = []
    for row, where in fields.records(content, param):
        kind = fields.text(row, "type", f"{where}.type") or "text"
        if kind in _TEXT_PARTS or kind == "refusal":
            texts.append(_text(row, kind, where))
        elif kind in _THOUGHTS:
            held = (row.get(name) for name in ("thinking", "reasoning", "text", "summary"))
            thoughts += [text for each in held for text in texts_of(each)]
        else:
            left_out.append(kind)
            texts += texts_only(as_one(list(texts_of(row))))
    return texts, thoughts


# ---------------------------------------------------------------- documents


def document(data: str, param: str, *head: str | None) -> dict[str, Any]:
    """Return the piece that shows a document below the lines of `head`."""
    return {"type": "document", "data": data, "param": param, "head": [row for row in head if row]}


def _file_part(row: dict[str, Any], param: str) -> dict[str, Any]:
    """Return the document of a part; chat has it in an object, Responses as it is.

    Raises:
        RequestError: it holds no data, but names a file or an address.
    """
    holder, where = row, param
    if row.get("file") is not None:
        where = f"{param}.file"
        holder = fields.record(row["file"], where)
    name = fields.text(holder, "filename", f"{where}.filename")
    if holder.get("file_data") is None:
        if holder.get("file_id") is not None:
            raise no_files(f"{where}.file_id")
        if holder.get("file_url") is not None:
            raise no_urls(f"{where}.file_url")
    data = fields.required_text(holder, "file_data", f"{where}.file_data")
    return document(data, f"{where}.file_data", name)


def no_files(param: str) -> RequestError:
    """Return the refusal of what is named as a file of the client's provider."""
    return RequestError(
        f"{param} names an uploaded file, and this server keeps none. Send the file itself, as a "
        "data: URL or in base64.",
        code="unsupported_content",
        param=param,
    )


def no_urls(param: str) -> RequestError:
    """Return the refusal of a document that would have to be fetched."""
    return RequestError(
        f"{param} is an address, and this server fetches no documents. Send the document itself, "
        "in base64.",
        code="unsupported_content",
        param=param,
    )


# ---------------------------------------------------------------- what no model here reads
#
# Hosted tools, their calls and results, and the like: a client that moves here with such a history
# must be answered. The text of it stays, the rest is left out, and one line of the log says so.

_NAMED_MAX: Final = 20  # kinds in one line of the log
_KIND: Final = re.compile(r"(tool_choice )?[a-z][a-z0-9_]{0,59}")  # words of an API
_TEXTS: Final = ("title", "url", "text", "stdout", "stderr", "logs")
# Their content is base64 or the like.
_OPAQUE: Final = ("base64", "file", "image_generation_call", "computer_call_output")
_HOLDERS: Final = ("content", "source", "summary", "output", "outputs", "result", "results")


def texts_of(value: Any) -> list[str]:
    """Return the readable texts in `value`, JSON of a kind that this server does not know."""
    if type(value) is str:
        return [value] if value.strip() else []
    if type(value) is list:
        return [text for item in value for text in texts_of(item)]
    if type(value) is not dict:
        return []
    found = [value[name] for name in _TEXTS if type(value.get(name)) is str and value[name].strip()]
    if value.get("type") == "text" and type(value.get("data")) is str:
        found.append(value["data"])
    for name in _HOLDERS:
        if value.get("type") not in _OPAQUE and name in value:
            found += texts_of(value[name])
    return found


def note_left_out(kinds: Iterable[str]) -> None:
    """Log once what of a request this server has no use for."""
    named = sorted({kind if _KIND.fullmatch(kind) else "(other)" for kind in kinds})
    if named:
        log.info("left out kinds=%r", ", ".join(named[:_NAMED_MAX]))


def is_media(kind: str) -> bool:
    return "image" in kind or "audio" in kind or "video" in kind


def omitted(kind: str) -> str:
    """Return what stands for content of `kind` in a tool's result: no agent can take one back."""
    return f"[{kind.removeprefix('input_').removesuffix('_url')} omitted: no model here reads it]"


def refuse_media(param: str, kind: str) -> None:
    """Raise where a content part of type `kind` is something that no model here can read."""
    if is_media(kind):
        raise RequestError(
            f"{param} is of type {kind!r}; text is read here and, by models that take them, "
            "images in this API's own form. Remove it.",
            code="unsupported_content",
            param=param,
        )
