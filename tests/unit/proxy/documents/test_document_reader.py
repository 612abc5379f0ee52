"""Documents are read as text once for each owner, and what is neither PDF nor text is refused."""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.documents import prompt_documents
from hearth.proxy.documents.pdf_refusals import PdfRefused
from hearth.proxy.documents.prompt_documents import DocumentReader, paged_text
from hearth.shared.errors import RequestError

PDF = b"%PDF-1.7 "


def code(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Pages:
    """Gives a PDF's own bytes as its one page, and counts what is read at once."""

    def __init__(self, wait_s: float = 0, fails: Exception | None = None) -> None:
        self.read: list[bytes] = []
        self.running = self.most = 0
        self._wait_s = wait_s
        self._fails = fails

    async def __call__(self, data: bytes) -> list[str]:
        self.read.append(data)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self._wait_s)
        self.running -= 1
        if self._fails is not None:
            raise self._fails
        return [data.decode("latin-1"), ""]


def texts(reader: DocumentReader, *asked: tuple[bytes, str]) -> list[Any]:
    """Return the texts of documents, or why there are none, all asked for at once."""

    async def read() -> list[Any]:
        reads = (reader.read(code(data), owner) for data, owner in asked)
        return await asyncio.gather(*reads, return_exceptions=True)

    return asyncio.run(read())


def test_a_pdf_is_read_once_and_its_pages_are_numbered() -> None:
    pages = Pages()
    reader = DocumentReader(pages)
    asked = [(PDF + b"a", ""), (PDF + b"a", ""), (PDF + b"b", "")]
    assert texts(reader, *asked) == [
        "Page 1:\n%PDF-1.7 a\n\nPage 2:\n(no text)",
        "Page 1:\n%PDF-1.7 a\n\nPage 2:\n(no text)",
        "Page 1:\n%PDF-1.7 b\n\nPage 2:\n(no text)",
    ]
    assert texts(reader, asked[0])[0].startswith("Page 1:\n%PDF-1.7 a")
    assert sorted(pages.read) == [PDF + b"a", PDF + b"b"]


def test_what_one_key_had_read_is_read_anew_for_another() -> None:
    pages = Pages()
    reader = DocumentReader(pages)
    for owner in ("mine", "theirs", "mine", "theirs"):
        assert len(texts(reader, (PDF, owner))) == 1
    assert pages.read == [PDF, PDF]


def test_one_key_has_one_pdf_read_at_a_time_and_all_together_two() -> None:
    one = Pages(0.01)
    texts(DocumentReader(one), *((PDF + bytes([65 + n]), "mine") for n in range(5)))
    assert (len(one.read), one.most) == (5, 1)
    several = Pages(0.01)
    asked = [(PDF + bytes([65 + n]), f"key {n}") for n in range(5)]
    texts(DocumentReader(several), *asked)
    assert (len(several.read), several.most) == (5, prompt_documents.PDFS_AT_ONCE)


def test_a_refusal_is_remembered_and_a_failure_of_ours_is_not() -> None:
    for fails, count in ((PdfRefused("pdf_invalid"), 1), (RequestError("x", status=503), 2)):
        pages = Pages(fails=fails)
        reader = DocumentReader(pages)
        found = [texts(reader, (PDF, ""))[0] for _ in range(2)]
        assert [str(error) for error in found] == [str(fails)] * 2
        assert [error.status for error in found] == [fails.status] * 2
        assert len(pages.read) == count


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_documents, "MEMORY_BYTES_MAX", 5_000)
    pages = Pages()
    reader = DocumentReader(pages)
    for _ in range(2):
        for name in range(20):
            assert texts(reader, (PDF + bytes([65 + name]), ""))
    assert len(pages.read) == 40, "each had gone when it was asked for again"
    assert texts(reader, (PDF + b"T", "")) and len(pages.read) == 40, "but for the last"


# ---------------------------------------------------------------- text


def read(data: str, work: Callable[[bytes], Awaitable[list[str]]] | None = None) -> str:
    return asyncio.run(DocumentReader(work or Pages()).read(data, ""))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"plain", "plain"),
        ("größer 模型\r\n".encode(), "größer 模型\r\n"),
        ("\ufeffmarked".encode(), "marked"),
        ("wide".encode("utf-16"), "wide"),
        ("größer".encode("cp1252"), "größer"),
        (b'{"json": true}', '{"json": true}'),
        (b"see %PDX-1.7", "see %PDX-1.7"),
        (b"A PDF begins with `%PDF-1.7`.\n", "A PDF begins with `%PDF-1.7`.\n"),
    ],
)
def test_a_file_of_text_is_read_as_it_is(data: bytes, text: str) -> None:
    assert read(code(data)) == read(f"data:any/thing;base64,{code(data)}") == text


@given(st.text().filter(lambda text: "\0" not in text and not text.startswith("\ufeff")))
def test_any_text_comes_as_it_was(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    if data and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        assert "%PDF-" in text or read(code(data)) == text


@pytest.mark.parametrize("before", [b"", b"\n ", b"\xef\xbb\xbf", b"HTTP/1.1 200\r\n", b"\0\1x"])
def test_a_pdf_may_begin_behind_what_others_put_before_it(before: bytes) -> None:
    assert read(code(before + PDF)).startswith("Page 1:")


@given(st.binary(min_size=1, max_size=99))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        assert "\0" not in read(code(data)) or b"%PDF-" in data
    except RequestError as error:
        assert (error.status, error.code) == (400, "document_type")


@pytest.mark.parametrize(
    ("data", "why", "said"),
    [
        (code(b"PK\x03\x04\x00\x00"), "document_type", "50 4b 03 04"),
        (code(b"\x89PNG\r\n\x1a\n\0\0"), "document_type", "parts? for images"),
        ("not base64!", "document_data", "not valid base64"),
        (code(PDF)[:-1] + "!", "document_data", "not valid base64"),
        ("data:application/pdf,abc", "document_data", "data:TYPE;base64,DATA"),
        ("https://example.org/a.pdf", "document_urls_off", "in base64"),
        ("file:///etc/passwd", "document_urls_off", "in base64"),
    ],
)
def test_what_is_no_document_is_refused_with_the_remedy(data: str, why: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        read(data)
    assert (caught.value.status, caught.value.code) == (400, why)


def test_a_document_that_is_too_large_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_documents, "DOCUMENT_BYTES_MAX", 9)
    assert read(code(b"x" * 9)) == "x" * 9
    with pytest.raises(RequestError, match="accepts 9") as caught:
        read("!" * 16)
    assert caught.value.code == "document_too_large"


@given(st.lists(st.text(max_size=5), min_size=1, max_size=9))
def test_every_page_has_its_number_in_order(pages: list[str]) -> None:
    text = paged_text(pages)
    assert text.startswith("Page 1:\n")
    at = [text.index(f"Page {number}:\n") for number in range(1, len(pages) + 1)]
    assert at == sorted(at)
    assert text.count("(no text)") >= pages.count("")
