"""Writes PDFs object by object: plain ones, and those that no honest program writes."""

import io
import zlib
from collections.abc import Iterable, Mapping, Sequence

from pypdf import PdfReader, PdfWriter

FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"


def stream(data: bytes, extra: str = "") -> bytes:
    """Return a stream object that holds `data` as it is."""
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(data), extra.encode(), data)


def packed(data: bytes) -> bytes:
    """Return a stream object that holds `data` by zlib."""
    return stream(zlib.compress(data, 9), "/Filter /FlateDecode")


def pdf(objects: Mapping[int, bytes], root: int = 1, extra: str = "") -> bytes:
    """Return a PDF of numbered `objects`, whose catalogue is `root`."""
    out = io.BytesIO(b"%PDF-1.7\n")
    out.seek(0, io.SEEK_END)
    places = {}
    for number, body in objects.items():
        places[number] = out.tell()
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, body))
    start = out.tell()
    out.write(b"xref\n0 1\n0000000000 65535 f \n")
    for number, place in places.items():
        out.write(b"%d 1\n%010d 00000 n \n" % (number, place))
    size = max(objects) + 1
    trailer = f"trailer\n<< /Size {size} /Root {root} 0 R {extra} >>\nstartxref\n{start}\n%%EOF\n"
    return out.getvalue() + trailer.encode()


def shown(lines: Iterable[str]) -> bytes:
    """Return the operators that write `lines` below each other."""
    rows = [line.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)") for line in lines]
    body = " T* ".join(f"({row}) Tj" for row in rows)
    return f"BT /F1 12 Tf 14 TL 72 720 Td {body} ET".encode("latin-1")


def page(contents: int, parent: int = 2, font: int = 3) -> bytes:
    return (
        f"<< /Type /Page /Parent {parent} 0 R /MediaBox [0 0 612 792] /Contents {contents} 0 R "
        f"/Resources << /Font << /F1 {font} 0 R >> >> >>"
    ).encode()


def text_pdf(*texts: str) -> bytes:
    """Return a PDF with a page for each of `texts`; "" is a page that shows nothing."""
    return pages_pdf([shown(text.split("\n")) if text else b"" for text in texts])


def pages_pdf(contents: Sequence[bytes]) -> bytes:
    """Return a PDF with a page for each of the operators in `contents`."""
    kids = " ".join(f"{4 + 2 * index} 0 R" for index in range(len(contents)))
    objects = {
        1: b"<< /Type /Catalog /Pages 2 0 R >>",
        2: f"<< /Type /Pages /Kids [{kids}] /Count {len(contents)} >>".encode(),
        3: FONT,
    }
    for index, operators in enumerate(contents):
        objects[4 + 2 * index] = page(5 + 2 * index)
        objects[5 + 2 * index] = packed(operators)
    return pdf(objects)


def encrypted(data: bytes, password: str, owner: str = "owner") -> bytes:
    """Return `data` encrypted by AES; without a password anybody may read it."""
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(data)))
    writer.encrypt(password, owner, algorithm="AES-256")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()
