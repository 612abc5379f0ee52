"""Reads the text of one PDF, and ends: `python -m hearth.proxy.documents.pdf_process`.

A PDF is a program in all but name, and whoever sent it may mean harm. So it is read here, where
the system bounds time and memory, nothing can be written, and nothing else is at stake. Nothing
of the PDF is logged.
"""

import contextlib
import io
import logging
import os
import re
import resource
import sys
import threading
import time
from typing import Any, Final

import orjson
from pypdf import PageObject, PdfReader
from pypdf.errors import DependencyError, FileNotDecryptedError, WrongPasswordError

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

LOOK_S: Final = 0.05  # between two looks at the memory
OPEN_FILES_MAX: Final = 32
_NOISE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")
_LOCKED: Final = (FileNotDecryptedError, WrongPasswordError, DependencyError)


class _Refused(Exception):
    """The PDF is not read."""

    def __init__(self, code: str, count: int = 0) -> None:
        super().__init__(code)
        self.answer = {"refused": code, "count": count}


def answer_of(data: bytes) -> dict[str, Any]:
    """Return what is answered about the PDF `data`."""
    try:
        return {"pages": _pages(data)}
    except _Refused as refused:
        return refused.answer
    except MemoryError:
        return {"refused": MEMORY}
    except _LOCKED:
        return {"refused": ENCRYPTED}
    except Exception:  # pypdf raises whatever a broken file leads it to
        return {"refused": INVALID}


def _pages(data: bytes) -> list[str]:
    """Return the text of each page; "" where it has none or cannot be read."""
    reader = PdfReader(io.BytesIO(data))
    count = len(reader.pages)
    if count > PAGES_MAX:
        raise _Refused(MANY_PAGES, count)
    texts: list[str] = []
    broken = chars = 0
    for page in reader.pages:
        try:
            text = _text_of(page)
        except MemoryError:
            raise
        except Exception as error:  # one page that is broken leaves the others
            if reader.is_encrypted and isinstance(error, _LOCKED):
                raise
            broken += 1
            text = ""
        texts.append(text)
        chars += len(text)
        if chars > TEXT_CHARS_MAX:
            raise _Refused(LONG, chars)
    if not any(texts):
        raise _Refused(INVALID if broken or not texts else NO_TEXT, count)
    return texts


def _text_of(page: PageObject) -> str:
    text = page.extract_text().replace("\r\n", "\n").replace("\r", "\n")
    plain = _NOISE.sub("", text.encode("utf-8", "replace").decode())
    return "\n".join(line.rstrip() for line in plain.split("\n")).strip()


def _limit() -> None:
    """Have the system end this process where it takes too much, and let it write no file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would hold a client's words
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES_MAX, OPEN_FILES_MAX))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S_MAX, CPU_S_MAX + 1))
    _watch_memory()
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        limit = _virtual_bytes() + MEMORY_BYTES_MAX
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _watch_memory() -> None:
    """End this process once it holds too much, where the system has no limit for that."""
    most = _resident_bytes() + MEMORY_BYTES_MAX

    def watch() -> None:
        while _resident_bytes() < most:
            time.sleep(LOOK_S)
        os._exit(MEMORY_STATUS)

    threading.Thread(target=watch, daemon=True).start()


def _resident_bytes() -> int:
    """Return the memory that this process holds; on macOS the most that it held so far.

    On Linux that most counts what the proxy held when it started this process.
    """
    try:
        return _pages_taken()[1] * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _virtual_bytes() -> int:
    """Return the address space that is taken. Raises OSError where the system does not tell."""
    return _pages_taken()[0] * resource.getpagesize()


def _pages_taken() -> list[int]:
    with open("/proc/self/statm") as file:
        return [int(count) for count in file.read().split()]


def main() -> None:
    """Answer about the PDF on standard input."""
    logging.disable()  # pypdf's warnings quote the file
    answers = os.dup(1)
    os.dup2(2, 1)  # what anything prints is no answer
    _limit()
    answer = orjson.dumps(answer_of(sys.stdin.buffer.read()))
    with open(answers, "wb") as out:
        out.write(answer)
    os._exit(0)  # what a broken PDF left behind is not tidied up


if __name__ == "__main__":
    main()
