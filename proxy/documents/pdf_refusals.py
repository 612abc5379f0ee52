"""Defines the limits and error texts for PDFs, shared by the proxy and the process that reads them.

The process gets the PDF on its standard input and writes JSON to its standard output:
{"pages": [text, ...]}, or {"refused": a code of TEXTS, "count": the measured value}.
"""

from typing import Final

from hearth.shared.errors import RequestError

PAGES_MAX: Final = 1_000
TEXT_CHARS_MAX: Final = 4_000_000  # characters of all pages
ANSWER_BYTES_MAX: Final = 4 * TEXT_CHARS_MAX + 1024 * 1024  # texts in UTF-8, and JSON's marks
CPU_S_MAX: Final = 20  # CPU time, the start of Python included
MEMORY_BYTES_MAX: Final = 512 * 1024 * 1024  # in addition to the memory at the process's start

# These texts contain Anthropic's words: Claude Code goes on without a PDF at the words "The PDF
# specified was not valid", "The PDF specified is password protected" or "maximum of N PDF pages".
TEXTS: Final = {
    "pdf_invalid": "The PDF specified was not valid: it is broken or cut off. Send it anew, or its "
    "text.",
    "pdf_encrypted": "The PDF specified is password protected. Send it without a password, or its "
    "text.",
    "pdf_without_text": "The PDF has {count} pages and no text: it was scanned, or drawn. Have its "
    "text recognised (OCR), or send its pages as images to a model that takes them.",
    "pdf_too_many_pages": "The PDF has {count} pages, and this server reads a maximum of "
    f"{PAGES_MAX} PDF pages. Send fewer, or the text of those that matter.",
    "pdf_too_long": f"The PDF has more than {TEXT_CHARS_MAX:,} characters of text, which is what "
    "this server reads of one. Send fewer pages.",
    "pdf_too_large": f"To read the PDF takes more than {MEMORY_BYTES_MAX >> 20} MB of memory. Send "
    "fewer pages, or its text.",
    "pdf_too_slow": f"To read the PDF takes more than {CPU_S_MAX} s of CPU time. Send fewer pages, "
    "or its text.",
}


class PdfRefused(RequestError):
    """The PDF itself is the reason that it is not read, so a retry would fail too."""

    def __init__(self, code: str, count: int = 0) -> None:
        super().__init__(TEXTS[code].format(count=count), code=code)
        self.count = count
