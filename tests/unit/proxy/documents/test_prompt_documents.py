"""Documents in all dialects, from a client's words to the text that a model is shown."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from hearth.proxy.documents import prompt_documents
from hearth.proxy.documents.pdf_refusals import PdfRefused
from hearth.proxy.documents.prompt_documents import (
    DOCUMENTS_MAX,
    DocumentReader,
    holds_documents,
    with_documents,
)
from hearth.shared.errors import Overloaded, RequestError
from hearth.shared.wire_messages import Prompt
from tests.helpers.pdf_files import text_pdf
from tests.helpers.proxy.proxy_app import app_of
from tests.helpers.proxy.read_bodies import prompt_of

PDF = b"%PDF-1.7 "
SHOWN = "Page 1:\nfirst\n\nPage 2:\nsecond"
PNG = f"data:image/png;base64,{base64.b64encode(b'PNG').decode()}"


def code(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def two_pages(data: bytes) -> list[str]:
    if data.endswith(b"bad"):
        raise PdfRefused("pdf_invalid")
    return ["first", "second"]


def chat_file(data: bytes, name: str | None = "a.pdf") -> dict[str, Any]:
    url = f"data:application/pdf;base64,{code(data)}"
    return {"type": "file", "file": {"filename": name, "file_data": url}}


def input_file(data: bytes, name: str | None = "a.pdf") -> dict[str, Any]:
    return {"type": "input_file", "filename": name, "file_data": code(data)}


def document(data: bytes, name: str | None = "a.pdf") -> dict[str, Any]:
    source = {"type": "base64", "media_type": "application/pdf", "data": code(data)}
    return {"type": "document", "title": name, "source": source}


def text(said: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": said}


FORMS = [("chat", "text", chat_file), ("chat", "text", input_file)]
FORMS += [("responses", "input_text", input_file), ("messages", "text", document)]


def read(prompt: Prompt, held: list[int] | None = None) -> Prompt:
    hold = [].append if held is None else held.append
    return asyncio.run(with_documents(prompt, DocumentReader(two_pages), "", hold))[0]


def refused(dialect: str, *rows: dict[str, Any], **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(prompt_of(dialect, *rows, **fields))
    assert caught.value.status == 400
    assert str(caught.value.param) in str(caught.value), "Messages' errors have no field for it"
    return caught.value


def result(dialect: str, *parts: Any) -> dict[str, Any]:
    if dialect == "chat":
        return {"role": "tool", "tool_call_id": "c", "content": list(parts)}
    if dialect == "responses":
        return {"type": "function_call_output", "call_id": "c", "output": list(parts)}
    block = {"type": "tool_result", "tool_use_id": "c", "content": list(parts)}
    return {"role": "user", "content": [block]}


# ---------------------------------------------------------------- every form, everywhere


@pytest.mark.parametrize(("dialect", "kind", "form"), FORMS)
def test_a_document_is_shown_as_text_among_the_texts_with_its_name(
    dialect: str, kind: str, form: Any
) -> None:
    content = [text("before", kind), form(PDF), text("behind", kind), form(b"plain", None)]
    prompt = prompt_of(dialect, {"role": "user", "content": content})
    assert holds_documents(prompt)
    told = read(prompt)
    assert not holds_documents(told)
    assert told.messages[0]["content"] == f"before\na.pdf\n{SHOWN}\nbehind\nplain"


@pytest.mark.parametrize(("dialect", "kind", "form"), FORMS)
def test_a_tools_result_shows_documents_and_says_which_cannot_be_read(
    dialect: str, kind: str, form: Any
) -> None:
    (row,) = read(prompt_of(dialect, result(dialect, text("read", kind), form(PDF)))).messages
    assert (row["role"], row["content"]) == ("tool", f"read\na.pdf\n{SHOWN}")
    (row,) = read(prompt_of(dialect, result(dialect, form(PDF + b"bad")))).messages
    assert row["content"].startswith("a.pdf\n[document omitted: The PDF specified was not valid")
    (row,) = read(prompt_of(dialect, result(dialect, form(b"PK\3\4\0")))).messages
    assert "[document omitted: A document is a PDF or text" in row["content"]


@pytest.mark.parametrize(("dialect", "kind", "form"), FORMS)
def test_a_question_with_one_that_cannot_be_read_is_a_400_that_names_its_place(
    dialect: str, kind: str, form: Any
) -> None:
    content = [text("a", kind), form(PDF + b"bad")]
    error = refused(dialect, {"role": "user", "content": content})
    assert error.code == "pdf_invalid"
    assert "].content[1]." in str(error.param)


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_questions_and_results_show_documents(role: str) -> None:
    error = refused("messages", {"role": role, "content": [document(PDF)]})
    assert error.code == "unsupported_content" and "user messages" in str(error)
    assert refused("chat", {"role": "system", "content": [chat_file(PDF)]}).code == error.code


def test_anthropics_documents_show_title_and_context_above_their_text() -> None:
    sources: list[dict[str, Any]] = [
        {"type": "text", "media_type": "text/plain", "data": "words"},
        {"type": "content", "content": [text("words")]},
        {"type": "content", "content": "words"},
        {"type": "base64", "media_type": "text/plain", "data": code(b"words")},
    ]
    for source in sources:
        block = {"type": "document", "title": "T", "context": "C", "source": source}
        (row,) = read(prompt_of("messages", {"role": "user", "content": [block]})).messages
        assert row["content"] == "T\nC\nwords"


def test_images_stay_where_they_are_beside_documents() -> None:
    image = {"type": "image_url", "image_url": {"url": PNG}}
    content = [text("a"), chat_file(PDF), image, chat_file(b"b", None), text("c")]
    (row,) = read(prompt_of("chat", {"role": "user", "content": content})).messages
    before, shown, behind = row["content"]
    assert (before["text"], behind["text"]) == (f"a\na.pdf\n{SHOWN}", "b\nc")
    assert shown == {"type": "image", "url": PNG, "param": "messages[0].content[2].image_url"}


@pytest.mark.parametrize(
    ("dialect", "part", "param"),
    [
        ("chat", {"type": "file", "file": {"file_id": "f"}}, "file.file_id"),
        ("chat", {"type": "file", "file": {"filename": "f"}}, "file.file_data"),
        ("chat", {"type": "file", "file": {"file_data": "https://a/b.pdf"}}, "file.file_data"),
        ("chat", {"type": "file", "file": "f"}, "file"),
        ("responses", {"type": "input_file", "file_id": "f"}, "file_id"),
        ("responses", {"type": "input_file", "file_url": "https://a/b.pdf"}, "file_url"),
        ("messages", {"type": "document", "source": {"type": "file", "file_id": "f"}}, "source"),
        ("messages", {"type": "document", "source": {"type": "url", "url": "u"}}, "source"),
    ],
)
def test_a_file_that_would_have_to_be_fetched_is_refused_and_in_a_result_left_out(
    dialect: str, part: dict[str, Any], param: str
) -> None:
    error = refused(dialect, {"role": "user", "content": [part]})
    assert str(error.param).endswith(f"content[0].{param}")
    (row,) = read(prompt_of(dialect, result(dialect, part))).messages
    assert "omitted" in row["content"]


# ---------------------------------------------------------------- limits


def test_one_document_too_many_is_refused_before_any_is_read() -> None:
    most = {"role": "user", "content": [chat_file(b"x", None)] * DOCUMENTS_MAX}
    assert read(prompt_of("chat", most)).messages[0]["content"].count("x") == DOCUMENTS_MAX
    error = refused("chat", most, {"role": "user", "content": [chat_file(b"x")]})
    assert (error.code, error.param) == (
        "too_many_documents",
        "messages[1].content[0].file.file_data",
    )


def test_texts_are_bounded_together_and_one_that_comes_twice_counts_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_documents, "TEXT_CHARS_MAX", 10)
    held: list[int] = []
    part = chat_file(b"12345", None)
    assert read(prompt_of("chat", {"role": "user", "content": [part, part]}), held)
    assert held == [5, 5]
    error = refused("chat", {"role": "user", "content": [part, part, chat_file(b"6", None)]})
    assert (error.code, "11" in str(error)) == ("documents_too_long", True)


def test_what_finds_no_room_ends_the_request_in_a_result_too() -> None:
    def no_room(count: int) -> None:
        raise Overloaded(f"no room for {count}")

    prompt = prompt_of("chat", result("chat", chat_file(b"12345")))
    with pytest.raises(Overloaded):
        asyncio.run(with_documents(prompt, DocumentReader(two_pages), "", no_room))


def test_a_failure_of_ours_is_a_503_in_a_result_too() -> None:
    async def lost(data: bytes) -> list[str]:
        raise RequestError("It is lost.", status=503, code="pdf_reader_lost", retry_after_s=5)

    prompt = prompt_of("messages", result("messages", document(PDF)))
    with pytest.raises(RequestError, match="It is lost") as caught:
        asyncio.run(with_documents(prompt, DocumentReader(lost), "", lambda _: None))
    assert (caught.value.status, caught.value.retry_after_s) == (503, 5)


def test_documents_that_take_too_long_together_are_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_documents, "DOCUMENTS_WAIT_S_MAX", 0.05)

    async def slow(data: bytes) -> list[str]:
        await asyncio.Event().wait()
        return []

    prompt = prompt_of("chat", {"role": "user", "content": [chat_file(PDF)]})
    with pytest.raises(RequestError) as caught:
        asyncio.run(with_documents(prompt, DocumentReader(slow), "", lambda _: None))
    assert (caught.value.status, caught.value.code) == (503, "documents_too_slow")


# ---------------------------------------------------------------- through the proxy


@pytest.mark.process
async def test_a_message_is_named_by_the_text_of_its_document_alone(tmp_path: Path) -> None:
    """In whatever dialect and dress a document comes, the cache knows the conversation."""
    body_parser = app_of(tmp_path).local.body_parser
    data, found = text_pdf("one", "two"), []
    shown = "a.pdf\nPage 1:\none\n\nPage 2:\ntwo\nWhat is it?"
    for dialect, form in (
        ("chat", [chat_file(data), text("What is it?")]),
        ("chat", shown),
        ("chat", [input_file(data), text("What is it?")]),
        ("messages", [document(data), text("What is it?")]),
    ):
        body = {"messages": [{"role": "user", "content": form}], "max_tokens": 9}
        request = await body_parser.complete(body_parser.parse(dialect, body, {}))
        assert request.prompt.messages[0]["content"] == shown
        found.append(request.prompt.names)
    first, *others = found
    assert first and all(other == first for other in others)
