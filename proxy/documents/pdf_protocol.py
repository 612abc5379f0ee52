"""Names what the process that reads one PDF answers, and its limits. Both sides import it.

The process is told the PDF on its standard input and answers JSON on its standard output:
{"pages": [text, ...]}, or {"refused": one of the codes below, "count": what was measured}.
"""

from typing import Final

INVALID: Final = "pdf_invalid"
ENCRYPTED: Final = "pdf_encrypted"
NO_TEXT: Final = "pdf_without_text"
MANY_PAGES: Final = "pdf_too_many_pages"
LONG: Final = "pdf_too_long"  # its text
MEMORY: Final = "pdf_too_large"  # what reading it takes

PAGES_MAX: Final = 1_000
TEXT_CHARS_MAX: Final = 4_000_000  # of all pages
CPU_S_MAX: Final = 20  # the start of Python included
MEMORY_BYTES_MAX: Final = 512 * 1024 * 1024  # beyond what the process has before it reads
MEMORY_STATUS: Final = 77  # the process ends with it where it finds that it takes too much
