"""A PDF is read in a process that ends within its limits, whatever was sent."""

import asyncio
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.documents import pdf_process, prompt_documents
from hearth.proxy.documents.pdf_refusals import (
    CPU_S_MAX,
    PAGES_MAX,
    TEXT_CHARS_MAX,
    TEXTS,
    PdfRefused,
)
from hearth.proxy.documents.prompt_documents import pdf_pages
from hearth.shared.errors import RequestError
from tests.helpers.pdf_files import (
    FONT,
    encrypted,
    packed,
    page,
    pages_pdf,
    pdf,
    shown,
    stream,
    text_pdf,
)

pytestmark = pytest.mark.process
MB = 1_000_000


def pages(data: bytes) -> list[str]:
    return asyncio.run(pdf_pages(data))


def refused(data: bytes) -> PdfRefused:
    with pytest.raises(PdfRefused) as caught:
        pages(data)
    assert caught.value.status == 400
    return caught.value


def test_pages_come_with_their_text_and_without_it() -> None:
    assert pages(text_pdf("Hello (world)\nsecond", "", "Third")) == [
        "Hello (world)\nsecond",
        "",
        "Third",
    ]


def test_no_module_that_lies_in_the_servers_directory_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "orjson.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    assert pages(text_pdf("mine")) == ["mine"]


def test_a_pdf_without_text_says_that_it_was_scanned() -> None:
    error = refused(text_pdf("", ""))
    assert error.code == "pdf_without_text"
    assert "2 pages and no text" in str(error) and "OCR" in str(error)


def test_one_that_anybody_may_read_is_read_and_one_with_a_password_is_not() -> None:
    assert pages(encrypted(text_pdf("for all"), "")) == ["for all"]
    error = refused(encrypted(text_pdf("for few"), "secret"))
    assert error.code == "pdf_encrypted"
    assert "The PDF specified is password protected" in str(error), "Claude Code looks for it"


@pytest.mark.parametrize("filter_name", ["JBIG2Decode", "BrotliDecode"])
def test_a_page_that_needs_a_program_which_is_not_here_is_broken_not_locked(
    filter_name: str,
) -> None:
    contents = {4: page(5), 5: stream(b"x" * 50, f"/Filter /{filter_name}")}
    tree = {1: b"<< /Type /Catalog /Pages 2 0 R >>", 3: FONT}
    one = {2: b"<< /Type /Pages /Kids [4 0 R] /Count 1 >>"}
    assert refused(pdf(tree | one | contents)).code == "pdf_invalid"
    two = {
        2: b"<< /Type /Pages /Kids [4 0 R 6 0 R] /Count 2 >>",
        6: page(7),
        7: packed(shown(["two"])),
    }
    assert pages(pdf(tree | two | contents)) == ["", "two"]


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6])
def test_one_that_is_cut_off_is_no_valid_one(share: float) -> None:
    data = text_pdf(*["some text"] * 20)
    error = refused(data[: int(len(data) * share)])
    assert error.code == "pdf_invalid"
    assert "The PDF specified was not valid" in str(error), "Claude Code looks for it"


def test_one_broken_page_leaves_the_others() -> None:
    good = text_pdf("one", "two", "three")
    contents = good.index(b"7 0 obj") + len(b"7 0 obj\n")
    broken = good[:contents] + b"[" + good[contents + 1 :]
    assert pages(broken)[::2] == ["one", "three"]


# ---------------------------------------------------------------- bombs

HEAD = b"BT /F1 12 Tf 72 720 Td "


def tree(depth: int) -> bytes:
    """Return a PDF whose one page lies below `depth` nodes."""
    objects = {1: b"<< /Type /Catalog /Pages 2 0 R >>", 3: FONT}
    for level in range(depth):
        below = 3 + level + 1 if level else 4
        number = 2 if level == 0 else 3 + level
        objects[number] = f"<< /Type /Pages /Kids [{below} 0 R] /Count 1 >>".encode()
    objects[3 + depth] = page(4 + depth)
    objects[4 + depth] = packed(HEAD + b"(deep) Tj ET")
    return pdf(objects)


def circle() -> bytes:
    kids = b"<< /Type /Pages /Kids [4 0 R] /Count 1 >>"
    back = b"<< /Type /Pages /Parent 2 0 R /Kids [2 0 R] /Count 1 >>"
    return pdf({1: b"<< /Type /Catalog /Pages 2 0 R >>", 2: kids, 4: back})


def many_kids(count: int) -> bytes:
    kids = "4 0 R " * count
    return pdf(
        {
            1: b"<< /Type /Catalog /Pages 2 0 R >>",
            2: f"<< /Type /Pages /Kids [{kids}] /Count {count} >>".encode(),
            3: FONT,
            4: page(5),
            5: packed(HEAD + b"(x) Tj ET"),
        }
    )


def fan(width: int, levels: int) -> bytes:
    """Return a PDF of width ** levels pages in as few nodes as there are levels."""
    objects = {1: b"<< /Type /Catalog /Pages 10 0 R >>", 3: FONT, 4: page(5), 5: packed(b"BT ET")}
    for level in range(levels):
        kids = f"{11 + level if level < levels - 1 else 4} 0 R " * width
        objects[10 + level] = f"<< /Type /Pages /Kids [{kids}] /Count 1 >>".encode()
    return pdf(objects)


def form_circle() -> bytes:
    """Return a PDF whose page draws a form that draws itself twice."""
    extra = "/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /A 6 0 R >> >>"
    return pdf(
        {
            1: b"<< /Type /Catalog /Pages 2 0 R >>",
            2: b"<< /Type /Pages /Kids [4 0 R] /Count 1 >>",
            4: b"<< /Type /Page /Parent 2 0 R /Contents 5 0 R /MediaBox [0 0 9 9] "
            b"/Resources << /XObject << /A 6 0 R >> >> >>",
            5: stream(b"/A Do"),
            6: stream(b"/A Do /A Do", extra),
        }
    )


def nested_filters() -> bytes:
    """Return a page of zeros that was packed three times: some GB in a few KB."""
    data = bytes(70 * MB)
    for _ in range(3):
        data = zlib.compress(data, 9)
    body = stream(data, "/Filter [/FlateDecode /FlateDecode /FlateDecode]")
    return pdf(
        {
            1: b"<< /Type /Catalog /Pages 2 0 R >>",
            2: b"<< /Type /Pages /Kids [4 0 R] /Count 1 >>",
            3: FONT,
            4: page(5),
            5: body,
        }
    )


BOMBS = {
    "a string of 70 MB": lambda: pages_pdf([HEAD + b"(" + b"A" * 70 * MB + b") Tj ET"]),
    "500 MB of operators": lambda: pages_pdf([b"BT " + b"() Tj " * (80 * MB)]),
    "60 MB of operators": lambda: pages_pdf([b"BT " + b"(a) Tj " * (8 * MB)]),
    "arrays in arrays": lambda: pages_pdf([HEAD + b"[" * MB + b"] TJ ET"]),
    "zeros packed three times": nested_filters,
    "a tree of 5,000 levels": lambda: tree(5_000),
    "a tree that is a circle": circle,
    "a form that draws itself": form_circle,
    "the same page 200,000 times": lambda: many_kids(200_000),
    "10 to the 9th pages": lambda: fan(1_000, 3),
    "a count of pages that is a lie": lambda: text_pdf("").replace(b"/Count 1", b"/Count 9"),
    "objects that stand for themselves": lambda: pdf({1: b"1 0 R"}),
    "a length of an exabyte": lambda: text_pdf("x").replace(b"/Length ", b"/Length 99999999999999"),
    "a cross reference to itself": lambda: b"%PDF-1.7\nstartxref\n0\n%%EOF\n",
    "nothing but a head": lambda: b"%PDF-1.7\n",
}


IN_EACH_RUN = {
    *("60 MB of operators", "zeros packed three times", "a tree that is a circle"),
    *("a form that draws itself", "10 to the 9th pages", "a length of an exabyte"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_EACH_RUN else pytest.mark.night) for name in BOMBS],
)
def test_a_pdf_bomb_is_a_400_within_the_limits(name: str) -> None:
    data = BOMBS[name]()
    assert len(data) < 4 * MB, "it is small as it comes"
    began = time.monotonic()
    assert refused(data).code.startswith("pdf_")
    assert time.monotonic() - began < prompt_documents.READ_S_MAX
    assert not children(), "no process is left"


def children() -> list[int]:
    """Return the processes that read PDFs for this one."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = status.read_text().rpartition(")")
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(rest.split()[1]) == os.getpid() and prompt_documents._MODULE.encode() in command:
            found.append(int(name.split()[0]))
    return found


def test_too_many_pages_are_named_as_claude_code_looks_for_them() -> None:
    error = refused(many_kids(PAGES_MAX + 1))
    assert error.code == "pdf_too_many_pages"
    assert f"maximum of {PAGES_MAX} PDF pages" in str(error) and f"{PAGES_MAX + 1}" in str(error)
    assert len(pages(many_kids(PAGES_MAX))) == PAGES_MAX


def test_a_text_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_process, "TEXT_CHARS_MAX", 10)
    assert "pages" in pdf_process.answer_of(text_pdf("12345", "67890"))
    answer = pdf_process.answer_of(text_pdf("12345", "678901"))
    assert answer == {"refused": "pdf_too_long", "count": 11}
    assert f"{TEXT_CHARS_MAX:,}" in TEXTS["pdf_too_long"]


# ---------------------------------------------------------------- the process


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have another program than ours answer."""
    path = tmp_path / "reader_of_pdfs.py"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(prompt_documents, "_MODULE", "reader_of_pdfs")
    return path


IMPORTED = [row for row in os.environ.get("PYTHONPATH", "").split(os.pathsep) if row]
MACOS = """
def none(): raise OSError
p.virtual_bytes = none
p.resident_bytes = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
"""


def limited(program: Path, body: str, before: str = "") -> None:
    """Have `body` run under the limits of a PDF's process; in it `p` sets them, `pdf` reads."""
    program.write_text(
        f"import sys\nsys.path[1:1] = {IMPORTED!r}\n"
        "from hearth.proxy.documents import pdf_process as pdf\n"
        f"from hearth.shared import process_limits as p\n{before}"
        f"p.limit_process(pdf.CPU_S_MAX, pdf.MEMORY_BYTES_MAX)\n{body}"
    )


def test_cpu_time_is_bounded_by_the_system(program: Path) -> None:
    limited(program, "while True: pass\n", "pdf.CPU_S_MAX = 1\n")
    error = refused(b"x")
    assert (error.code, f"{CPU_S_MAX} s of CPU" in str(error)) == ("pdf_too_slow", True)


@pytest.mark.parametrize("before", ["", MACOS], ids=["by the system", "by the watch, as on macOS"])
def test_memory_is_bounded(program: Path, before: str) -> None:
    work = """
def work(data):
    held = b"x" * (600 << 20)
    p.time.sleep(20)
pdf._pages = work
pdf.os.write(1, pdf.orjson.dumps(pdf.answer_of(b"")))
"""
    limited(program, work, before)
    began = time.monotonic()
    assert refused(b"x").code == "pdf_too_large"
    assert time.monotonic() - began < 15


def test_nothing_is_written_and_nothing_is_known_there(program: Path, tmp_path: Path) -> None:
    limited(
        program,
        "import json, os\n"
        f"try:\n    open({str(tmp_path / 'made')!r}, 'w').write('x' * 9)\n    wrote = True\n"
        "except OSError: wrote = False\n"
        "print(json.dumps({'pages': [str(wrote), *sorted(os.environ)]}))\n",
    )
    os.environ["A_KEY_OF_OURS"] = "secret"
    try:
        wrote, *names = pages(b"x")
    finally:
        del os.environ["A_KEY_OF_OURS"]
    assert wrote == "False" or (tmp_path / "made").stat().st_size == 0
    assert set(names) <= {"PATH", "PYTHONPATH", "MALLOC_ARENA_MAX", "LC_CTYPE"}


@pytest.mark.parametrize("body", ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)"])
def test_a_process_that_the_system_ends_blames_no_pdf(program: Path, body: str) -> None:
    program.write_text(body)
    with pytest.raises(RequestError) as caught:
        pages(b"x" * 3 * MB)
    assert (caught.value.status, caught.value.code) == (503, "pdf_reader_lost")
    assert not isinstance(caught.value, PdfRefused)


def test_one_that_stands_still_is_ended(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_documents, "READ_S_MAX", 0.5)
    program.write_text("import time\ntime.sleep(60)\n")
    began = time.monotonic()
    with pytest.raises(RequestError) as caught:
        pages(b"x" * 3 * MB)
    assert caught.value.status == 503 and "within 0.5 s" in str(caught.value)
    assert time.monotonic() - began < 30
    assert not children()


def test_one_that_answers_without_an_end_is_ended(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_documents, "ANSWER_BYTES_MAX", 1_000)
    program.write_text("while True: print('x' * 999)\n")
    with pytest.raises(RequestError) as caught:
        pages(b"x")
    assert caught.value.status == 503 and "1,000 bytes" in str(caught.value)
    assert not children()


async def test_a_client_that_leaves_ends_it(program: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    program.write_text(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(60)\n")
    task = asyncio.create_task(pdf_pages(b"x"))
    while not begun.exists():
        await asyncio.sleep(0.01)
    assert children()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not children()


def test_a_tree_of_some_levels_is_no_bomb() -> None:
    assert pages(tree(40)) == ["deep"]


async def test_the_event_loop_goes_on_while_a_bomb_is_read() -> None:
    longest, task = 0.0, asyncio.create_task(pdf_pages(BOMBS["60 MB of operators"]()))
    while not task.done():
        before = time.monotonic()
        await asyncio.sleep(0.005)
        longest = max(longest, time.monotonic() - before)
    with pytest.raises(PdfRefused):
        task.result()
    assert longest < 1.0, "seconds of work are not in it"


@given(st.data())
def test_any_damage_gives_pages_or_a_refusal(data: st.DataObject) -> None:
    """What the process answers, in this one, where its limits do not hold: files are small."""
    octets = bytearray(text_pdf("one two", "three"))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(octets) - 1))
        octets[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    answer = pdf_process.answer_of(bytes(octets))
    assert answer.keys() in ({"pages"}, {"refused", "count"})
    assert all(type(text) is str for text in answer.get("pages", []))
    assert answer.get("refused", "pdf_") in (*TEXTS, "pdf_")
