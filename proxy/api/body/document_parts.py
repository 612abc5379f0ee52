"""Reads parts that hold a document: a PDF or a file of text, as it is named until it is read.

That is {"type": "document", "data", "param", "head"}: its base64 or data: URL, the place that a
refusal names, and the lines that stand above its text.
"""

from typing import Any, Final

from hearth.proxy.api.body import field_readers as fields
from hearth.shared.errors import RequestError

FILE_PARTS: Final = frozenset(("file", "input_file"))


def document(data: str, param: str, *head: str | None) -> dict[str, Any]:
    """Return the piece that shows a document below the lines of `head`."""
    return {"type": "document", "data": data, "param": param, "head": [row for row in head if row]}


def file_part(row: dict[str, Any], param: str) -> dict[str, Any]:
    """Return the document of a part; chat has it in an object, Responses as it is.

    Raises:
        RequestError: it holds no data, but names a file or an address.
    """
    holder, where = row, param
    if row.get("file") is not None:
        where = f"{param}.file"
        holder = fields.record(row["file"], where)
    name = fields.text(holder, "filename", f"{where}.filename")
    if holder.get("file_data") is None:
        if holder.get("file_id") is not None:
            raise no_files(f"{where}.file_id")
        if holder.get("file_url") is not None:
            raise no_urls(f"{where}.file_url")
    data = fields.required_text(holder, "file_data", f"{where}.file_data")
    return document(data, f"{where}.file_data", name)


def no_files(param: str) -> RequestError:
    """Return the refusal of what is named as a file of the client's provider."""
    return RequestError(
        f"{param} names an uploaded file, and this server keeps none. Send the file itself, as a "
        "data: URL or in base64.",
        code="unsupported_content",
        param=param,
    )


def no_urls(param: str) -> RequestError:
    """Return the refusal of a document that would have to be fetched."""
    return RequestError(
        f"{param} is an address, and this server fetches no documents. Send the document itself, "
        "in base64.",
        code="unsupported_content",
        param=param,
    )
