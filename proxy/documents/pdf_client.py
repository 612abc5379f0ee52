"""Has one PDF read in a process of its own, and says what came of it."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from typing import Any, Final

import orjson

from hearth.proxy.documents.pdf_protocol import (
    CPU_S_MAX,
    ENCRYPTED,
    INVALID,
    LONG,
    MANY_PAGES,
    MEMORY,
    MEMORY_BYTES_MAX,
    MEMORY_STATUS,
    NO_TEXT,
    PAGES_MAX,
    TEXT_CHARS_MAX,
)
from hearth.shared.errors import RequestError

READ_S_MAX: Final = 45.0  # of a PDF: a machine may be busy; its CPU time has a limit of its own
ANSWER_BYTES_MAX: Final = 4 * TEXT_CHARS_MAX + 1024 * 1024  # UTF-8, and what JSON adds
SLOW: Final = "pdf_too_slow"
_MODULE: Final = "hearth.proxy.documents.pdf_process"
_CRASHES: Final = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)  # where memory runs out
_PART_BYTES: Final = 1024 * 1024

# Claude Code goes on without a PDF where it reads "The PDF specified was not valid", "The PDF
# specified is password protected" or "maximum of N PDF pages", which are Anthropic's words.
_TEXTS: Final = {
    INVALID: "The PDF specified was not valid: it is broken or cut off. Send it anew, or its text.",
    ENCRYPTED: "The PDF specified is password protected. Send it without a password, or its text.",
    NO_TEXT: "The PDF has {count} pages and no text: it was scanned, or drawn. Have its text "
    "recognised (OCR), or send its pages as images to a model that takes them.",
    MANY_PAGES: "The PDF has {count} pages, and this server reads a maximum of "
    f"{PAGES_MAX} PDF pages. Send fewer, or the text of those that matter.",
    LONG: f"The PDF has more than {TEXT_CHARS_MAX:,} characters of text, which is what this server "
    "reads of one. Send fewer pages.",
    MEMORY: f"To read the PDF takes more than {MEMORY_BYTES_MAX >> 20} MB of memory. Send fewer "
    "pages, or its text.",
    SLOW: f"To read the PDF takes more than {CPU_S_MAX} s of CPU time. Send fewer pages, or its "
    "text.",
}


class PdfRefused(RequestError):
    """A PDF is not read, for what it is: it would not be at another time either."""

    def __init__(self, code: str, count: int = 0) -> None:
        super().__init__(_TEXTS[code].format(count=count), code=code)


async def pdf_pages(data: bytes) -> list[str]:
    """Return the text of each page of the PDF `data`, "" where a page has none.

    Cancelled, it leaves no process behind.

    Raises:
        PdfRefused: it is none, has no text, or takes more than a limit.
        RequestError: 503; the process was ended by the system, or stands still.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", _MODULE),  # -P: the directory may be anybody's
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,  # it may quote the file
        env=_environment(),
        start_new_session=True,  # Ctrl-C at the server's terminal is not for it
    )
    try:
        async with asyncio.timeout(READ_S_MAX):
            answer = await _answer(process, data)
            status = await process.wait()
    except TimeoutError:
        raise _lost(f"gave no answer within {READ_S_MAX:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await _ended(process)
    return _pages(answer, status)


async def _ended(process: Process) -> None:
    """Wait until a process that was killed is gone, and read what it left behind.

    asyncio of Python 3.11 tells nobody of its end while its output waits (cpython, gh-119710).
    """
    assert process.stdout is not None
    while await process.stdout.read(_PART_BYTES):
        pass
    await process.wait()


def _environment() -> dict[str, str]:
    """Return its environment: no key of ours, and no path to programs that pypdf may call."""
    kept = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    return kept | {"PATH": os.devnull, "MALLOC_ARENA_MAX": "1"}


async def _answer(process: Process, data: bytes) -> bytes:
    """Tell the process the PDF, and return what it answers, or what it gave before it ended."""
    assert process.stdin is not None and process.stdout is not None
    sending = asyncio.create_task(_send(process.stdin, data))
    try:
        parts, size = [], 0
        while part := await process.stdout.read(_PART_BYTES):
            size += len(part)
            if size > ANSWER_BYTES_MAX:
                raise _lost(f"answered more than {ANSWER_BYTES_MAX:,} bytes")
            parts.append(part)
        return b"".join(parts)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def _send(stdin: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended
        for start in range(0, len(data), _PART_BYTES):
            stdin.write(data[start : start + _PART_BYTES])
            await stdin.drain()
        stdin.close()


def _pages(answer: bytes, status: int) -> list[str]:
    """Return the pages of an answer. Raises: RequestError: there are none."""
    if status == -signal.SIGXCPU:
        raise PdfRefused(SLOW)
    if status == MEMORY_STATUS or status in _CRASHES:
        raise PdfRefused(MEMORY)
    if status != 0:
        raise _lost(f"ended with status {status}")
    told: dict[str, Any] = orjson.loads(answer)
    if "pages" not in told:
        raise PdfRefused(told["refused"], told.get("count", 0))
    pages: list[str] = told["pages"]
    return pages


def _lost(what: str) -> RequestError:
    return RequestError(
        f"The process that reads PDFs {what}. Send the request again.",
        status=503,
        code="pdf_reader_lost",
        retry_after_s=5,
    )
