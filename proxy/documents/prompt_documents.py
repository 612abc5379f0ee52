"""Replaces the documents of a prompt by their texts.

A PDF is read in a process of its own; any other document is decoded as text. A document's
type is decided by its bytes, not by its name. No URL is fetched and no path opened.
"""

import asyncio
import signal
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final, TypeVar

import orjson

from hearth.proxy.documents.pdf_refusals import ANSWER_BYTES_MAX, PdfRefused
from hearth.proxy.http.base64_data import decode_base64
from hearth.proxy.request.content_pieces import ContentPart, join, merge_texts
from hearth.shared.errors import RequestError
from hearth.shared.helper_process import HelperLost, run_helper
from hearth.shared.memory_by_owner import MemoryByOwner
from hearth.shared.process_limits import MEMORY_STATUS
from hearth.shared.wire_messages import Prompt

T = TypeVar("T")

DOCUMENTS_MAX: Final = 100  # documents in one request; repeated documents count again
TEXT_CHARS_MAX: Final = 8_000_000  # characters of all documents of a request
DOCUMENTS_WAIT_S_MAX: Final = 60.0  # time for all documents of a request, waits included
DOCUMENT_BYTES_MAX: Final = 32 * 1024 * 1024
MEMORY_BYTES_MAX: Final = 32 * 1024 * 1024  # bytes of remembered texts
PDFS_AT_ONCE: Final = 2  # processes at once; further PDFs wait
DIGEST_BYTES: Final = 16
_HEAD_BYTES: Final = 1_024  # first bytes, which must contain a PDF's mark
_DATA_URL: Final = "data:"
_MARK: Final = ";base64,"
_MARK_CHARS: Final = 256  # first characters, which must contain the mark of a data: URL
_IMAGES: Final = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"RIFF")
_BLANK_PAGE: Final = "(no text)"
READ_S_MAX: Final = 45.0  # wall time for one PDF on a busy machine; CPU_S_MAX limits CPU time
_MODULE: Final = "hearth.proxy.documents.pdf_process"
# Exit codes of a process that is out of memory: its own code, or a crash.
_MEMORY: Final = (MEMORY_STATUS, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)


async def pdf_pages(data: bytes) -> list[str]:
    """Return the text of each page of the PDF `data`, "" for a page without text.

    If the caller is cancelled, the process is killed.

    Raises:
        PdfRefused: it is no PDF, has no text, or exceeds a limit.
        RequestError: 503; the system ended the process, or it hangs.
    """
    try:
        answer, status = await run_helper(_MODULE, data, READ_S_MAX, ANSWER_BYTES_MAX)
    except HelperLost as lost:
        raise _lost(str(lost)) from None
    if status == -signal.SIGXCPU:
        raise PdfRefused("pdf_too_slow")
    if status in _MEMORY:
        raise PdfRefused("pdf_too_large")
    if status != 0:
        raise _lost(f"ended with status {status}")
    result: dict[str, Any] = orjson.loads(answer)
    if "refused" in result:
        raise PdfRefused(result["refused"], result["count"])
    pages: list[str] = result["pages"]
    return pages


def _lost(what: str) -> RequestError:
    return RequestError(
        f"The process that reads PDFs {what}. Send the request again.",
        status=503,
        code="pdf_reader_lost",
        retry_after_s=5,
    )


class DocumentReader:
    """Reads documents, and remembers the texts of PDFs. Owner: the event loop.

    Each owner (API key digest; "" = requests without a key) has remembered texts of its own. An
    owner reads one PDF at a time, so that many PDFs of one key leave a process free for another
    key. A PDF is remembered as its text in UTF-8, or as the reason why it is refused.
    """

    def __init__(self, read_pdf: Callable[[bytes], Awaitable[list[str]]] = pdf_pages) -> None:
        """`read_pdf` is a parameter for tests."""
        self._read_pdf = read_pdf
        # Kept for one key: texts of PDFs, 32 MB
        self._known: MemoryByOwner[bytes, bytes | PdfRefused] = MemoryByOwner(
            MEMORY_BYTES_MAX,
            lambda _, known: 1_000 + (len(known) if isinstance(known, bytes) else 0),
        )
        self._process_slots = asyncio.Semaphore(PDFS_AT_ONCE)
        # Kept for a moment: locks by owner, while a PDF of the owner is read
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._decoder = asyncio.Semaphore(1)  # a second thread would slow the event loop down

    async def read(self, data: str, owner: str) -> str:
        """Return the text of a document, given in base64 or as a data: URL.

        Raises:
            RequestError: it is no PDF and no text, or is over a limit; 503, the process was lost.
        """
        start = _start_of(data)
        if (size := (len(data) - start) // 4 * 3) > DOCUMENT_BYTES_MAX:
            raise RequestError(
                f"The document has {size:,} bytes and this server accepts "
                f"{DOCUMENT_BYTES_MAX:,}. Send a part of it, or its text.",
                code="document_too_large",
            )
        head = _decoded(data[start : start + _HEAD_BYTES * 4 // 3 // 4 * 4 + 4])
        if not _is_pdf(head):
            return await self._in_thread(lambda: _plain_text(_decoded(data, start)))
        digest = await self._in_thread(
            lambda: blake2b(
                data[start:].encode("utf-8", "replace"), digest_size=DIGEST_BYTES
            ).digest()
        )
        lock = self._locks.setdefault(owner, asyncio.Lock())
        async with lock:  # a second request for the same PDF finds a remembered text
            known = self._known.get(owner, digest)
            if known is None:
                known = await self._read_anew(data, start)
                self._known.put(owner, digest, known)
        if isinstance(known, PdfRefused):
            raise PdfRefused(known.code, known.count)  # a copy without the old traceback
        return known.decode()

    async def _read_anew(self, data: str, start: int) -> bytes | PdfRefused:
        """Return the text or refusal of a new PDF. Raises: RequestError: a retry may succeed."""
        async with self._process_slots:
            octets = await self._in_thread(lambda: _decoded(data, start))
            try:
                return paged_text(await self._read_pdf(octets)).encode()
            except PdfRefused as refused:
                return PdfRefused(refused.code, refused.count)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        async with self._decoder:
            return await asyncio.to_thread(work)


def paged_text(pages: list[str]) -> str:
    """Return the text of a PDF as the model gets it: the pages, each under its number."""
    return "\n\n".join(
        f"Page {number}:\n{text or _BLANK_PAGE}" for number, text in enumerate(pages, start=1)
    )


def _is_pdf(head: bytes) -> bool:
    """Return whether a PDF's mark stands at a line's start in `head`, or after binary bytes.

    A text that merely mentions the mark is no PDF.
    """
    before, mark, _ = head.partition(b"%PDF-")
    before = before.removeprefix(b"\xef\xbb\xbf").rstrip(b" \t")
    return bool(mark) and (before[-1:] in (b"", b"\r", b"\n") or b"\0" in before)


def _start_of(data: str) -> int:
    """Return where the base64 begins in `data`, a data: URL or bare base64.

    Raises:
        RequestError: `data` is a URL of another kind.
    """
    if data[: len(_DATA_URL)].lower() == _DATA_URL:
        mark_at = data.find(_MARK, 0, _MARK_CHARS)
        if mark_at < 0:
            raise RequestError(
                "A data: URL of a document is data:TYPE;base64,DATA, and this one is not.",
                code="document_data",
            )
        return mark_at + len(_MARK)
    if "://" in data[:_MARK_CHARS]:
        raise RequestError(
            "This server fetches no documents. Send the document itself, in base64.",
            code="document_urls_off",
        )
    return 0


def _decoded(data: str, start: int = 0) -> bytes:
    try:
        return decode_base64(data, start)
    except ValueError as error:
        raise RequestError(
            f"The document is not valid base64 ({error}). Send it padded, without line breaks, in "
            "the alphabet with + and /.",
            code="document_data",
        ) from None


def _plain_text(data: bytes) -> str:
    """Return the text of a text file. Raises: RequestError: the file is binary."""
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        text = "\0" if b"\0" in data else data.decode("cp1252", "replace")
    if "\0" not in text:
        return text
    if data.startswith(_IMAGES):
        remedy = "An image goes in a part for images (image_url, input_image, image)."
    else:
        remedy = "Send it as a PDF, or as text."
    raise RequestError(
        "A document is a PDF or text, whatever it is called, and this one begins with "
        f"{data[:8].hex(' ')}. {remedy}",
        code="document_type",
    )


# ------------------------------------------------------------ all documents of a prompt


def holds_documents(prompt: Prompt) -> bool:
    return any(_documents(prompt))


async def with_documents(
    prompt: Prompt, documents: DocumentReader, owner: str, hold: Callable[[int], None]
) -> tuple[Prompt, int]:
    """Return `prompt` with the texts of its documents, and the number of their characters.

    `hold` is called with the size of each text, and may raise. In a tool's result, which no client
    can take back, a line replaces a document that cannot be read.

    Raises:
        RequestError: there are too many documents, they are too long together, or one cannot be
            read; the error names the field.
    """
    for count, part in enumerate(_documents(prompt), start=1):
        if count > DOCUMENTS_MAX:
            raise RequestError(
                f"{part['param']} is one document more than the {DOCUMENTS_MAX} that this server "
                "reads in a request. Send fewer.",
                code="too_many_documents",
                param=part["param"],
            )
    chars = 0  # characters of the texts so far

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
            raise RequestError(
                f"The documents of this request, as far as {param}, have {chars:,} characters of "
                f"text and this server accepts {TEXT_CHARS_MAX:,}. Send fewer.",
                code="documents_too_long",
                param=param,
            )
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
        return message | {"content": merge_texts(join(pieces))}

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
