"""Puts the texts of documents into a prompt, in the places of the documents."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from hearth.proxy.documents.document_reader import DocumentReader
from hearth.proxy.request.content_pieces import ContentPart, join, merged
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Prompt

DOCUMENTS_MAX: Final = 100  # in one request; one that comes twice counts twice
TEXT_CHARS_MAX: Final = 8_000_000  # of all documents of a request
DOCUMENTS_WAIT_S_MAX: Final = 60.0  # for all of a request, the wait for their turn included


def holds_documents(prompt: Prompt) -> bool:
    return any(_documents(prompt))


async def with_documents(
    prompt: Prompt, documents: DocumentReader, owner: str, hold: Callable[[int], None]
) -> tuple[Prompt, int]:
    """Return `prompt` with the texts of its documents, and how many characters these are.

    `hold` is told the size of each text, and may raise. In a tool's result a line says why a
    document is not read: no client can take a result back.

    Raises:
        RequestError: too many, too long together, or one that cannot be read, whose place it names.
    """
    for count, part in enumerate(_documents(prompt), start=1):
        if count > DOCUMENTS_MAX:
            told = (
                f"{part['param']} is one document more than the {DOCUMENTS_MAX} that this server "
                "reads in a request. Send fewer."
            )
            raise RequestError(told, code="too_many_documents", param=part["param"])
    chars = 0  # of the texts so far

    async def text_of(part: dict[str, Any], is_result: bool) -> str:
        nonlocal chars
        param = part["param"]
        try:
            text = await documents.read(part["data"], owner)
        except RequestError as error:
            if error.status != 400 or not is_result:
                raise RequestError(
                    f"{param}: {error}",
                    status=error.status,
                    code=error.code,
                    param=param,
                    retry_after_s=error.retry_after_s,
                ) from None
            text = f"[document omitted: {error}]"
        shown = "\n".join((*part["head"], text))
        hold(len(shown))
        chars += len(shown)
        if chars > TEXT_CHARS_MAX:
            told = (
                f"The documents of this request, as far as {param}, have {chars:,} characters of "
                f"text and this server accepts {TEXT_CHARS_MAX:,}. Send fewer."
            )
            raise RequestError(told, code="documents_too_long", param=param)
        return shown

    async def with_texts(message: dict[str, Any]) -> dict[str, Any]:
        content, is_result = message["content"], message["role"] == "tool"
        if type(content) is not list or not any(map(_is_document, content)):
            return message
        pieces: list[ContentPart] = []
        for part in content:
            if _is_document(part):
                pieces.append(await text_of(part, is_result))
            else:
                pieces.append(part["text"] if part["type"] == "text" else part)
        return message | {"content": merged(join(pieces))}

    try:
        async with asyncio.timeout(DOCUMENTS_WAIT_S_MAX):
            messages = [await with_texts(message) for message in prompt.messages]
    except TimeoutError:
        raise RequestError(
            f"The documents of this request were not all read within {DOCUMENTS_WAIT_S_MAX:g} s. "
            "Send it again: those that were read are remembered.",
            status=503,
            code="documents_too_slow",
            retry_after_s=5,
        ) from None
    return replace(prompt, messages=messages), chars


def _is_document(part: dict[str, Any]) -> bool:
    return bool(part["type"] == "document")


def _documents(prompt: Prompt) -> Iterator[dict[str, Any]]:
    for message in prompt.messages:
        if type(message["content"]) is list:
            yield from filter(_is_document, message["content"])
