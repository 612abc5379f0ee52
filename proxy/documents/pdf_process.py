"""Reads the text of one PDF, and exits: `python -m hearth.proxy.documents.pdf_process`.

A PDF is as powerful as a program, and its sender may mean harm. So it is read in a process of its
own, where the system limits time and memory and no file can be written. Nothing of the PDF is
logged.
"""

import io
import logging
import os
import re
import sys
from typing import Any, Final

import orjson
from pypdf import PageObject, PdfReader
from pypdf.errors import DependencyError, FileNotDecryptedError, WrongPasswordError

from hearth.proxy.documents.pdf_refusals import (
    CPU_S_MAX,
    MEMORY_BYTES_MAX,
    PAGES_MAX,
    TEXT_CHARS_MAX,
    PdfRefused,
)
from hearth.shared.process_limits import limit_process

_NOISE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")
_LOCKED: Final = (FileNotDecryptedError, WrongPasswordError, DependencyError)


def answer_of(data: bytes) -> dict[str, Any]:
    """Return the JSON answer for the PDF `data`: its pages, or why it is refused."""
    try:
        return {"pages": _pages(data)}
    except PdfRefused as refused:
        return {"refused": refused.code, "count": refused.count}
    except MemoryError:
        return {"refused": "pdf_too_large", "count": 0}
    except _LOCKED:
        return {"refused": "pdf_encrypted", "count": 0}
    except Exception:  # a broken file may make pypdf raise any error
        return {"refused": "pdf_invalid", "count": 0}


def _pages(data: bytes) -> list[str]:
    """Return the text of each page; "" for a page that is broken or has no text."""
    reader = PdfReader(io.BytesIO(data))
    count = len(reader.pages)
    if count > PAGES_MAX:
        raise PdfRefused("pdf_too_many_pages", count)
    texts: list[str] = []
    broken = chars = 0
    for page in reader.pages:
        try:
            text = _text_of(page)
        except MemoryError:
            raise
        except Exception as error:  # the other pages can still be read
            if reader.is_encrypted and isinstance(error, _LOCKED):
                raise
            broken += 1
            text = ""
        texts.append(text)
        chars += len(text)
        if chars > TEXT_CHARS_MAX:
            raise PdfRefused("pdf_too_long", chars)
    if not any(texts):
        raise PdfRefused("pdf_invalid" if broken or not texts else "pdf_without_text", count)
    return texts


def _text_of(page: PageObject) -> str:
    text = page.extract_text().replace("\r\n", "\n").replace("\r", "\n")
    plain = _NOISE.sub("", text.encode("utf-8", "replace").decode())
    return "\n".join(line.rstrip() for line in plain.split("\n")).strip()


def main() -> None:
    """Read the PDF on standard input, and write the answer to standard output."""
    logging.disable()  # pypdf's warnings quote the file
    answers = os.dup(1)
    os.dup2(2, 1)  # printed text must not get into the answer
    limit_process(CPU_S_MAX, MEMORY_BYTES_MAX)
    answer = orjson.dumps(answer_of(sys.stdin.buffer.read()))
    with open(answers, "wb") as out:
        out.write(answer)
    os._exit(0)  # without cleaning up after a broken PDF


if __name__ == "__main__":
    main()
