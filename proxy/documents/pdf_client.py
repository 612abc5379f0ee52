"""Has one PDF read in a process of its own, and says what came of it."""

import signal
from typing import Any, Final

import orjson

from hearth.proxy.documents.pdf_refusals import TEXT_CHARS_MAX, PdfRefused
from hearth.shared.errors import RequestError
from hearth.shared.helper_process import HelperLost, run_helper
from hearth.shared.process_limits import MEMORY_STATUS

READ_S_MAX: Final = 45.0  # of a PDF: a machine may be busy; its CPU time has a limit of its own
ANSWER_BYTES_MAX: Final = 4 * TEXT_CHARS_MAX + 1024 * 1024  # UTF-8, and what JSON adds
_MODULE: Final = "hearth.proxy.documents.pdf_process"
# Where memory runs out a process crashes, if it does not say so.
_MEMORY: Final = (MEMORY_STATUS, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)


async def pdf_pages(data: bytes) -> list[str]:
    """Return the text of each page of the PDF `data`, "" where a page has none.

    Cancelled, it leaves no process behind.

    Raises:
        PdfRefused: it is none, has no text, or takes more than a limit.
        RequestError: 503; the process was ended by the system, or stands still.
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
    told: dict[str, Any] = orjson.loads(answer)
    if "refused" in told:
        raise PdfRefused(told["refused"], told["count"])
    pages: list[str] = told["pages"]
    return pages


def _lost(what: str) -> RequestError:
    return RequestError(
        f"The process that reads PDFs {what}. Send the request again.",
        status=503,
        code="pdf_reader_lost",
        retry_after_s=5,
    )
