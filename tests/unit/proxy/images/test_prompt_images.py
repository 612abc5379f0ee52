"""Images in all dialects, from a client's words to the files that a worker gets."""

import asyncio
import base64
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.images import prompt_images
from hearth.proxy.images.prompt_images import (
    IMAGES_MAX,
    ImageFetcher,
    NamedImage,
    shows_images,
    with_images,
)
from hearth.proxy.request.content_pieces import join, join_text, merge_texts
from hearth.shared.errors import Overloaded, RequestError
from hearth.shared.wire_messages import Prompt
from tests.helpers.proxy.proxy_app import app_of
from tests.helpers.proxy.read_bodies import prompt_of

PNG = b"\x89PNG\r\n\x1a\n"
ONE, TWO = PNG + b"one", PNG + b"two"


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def text(said: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": said}


def shown(data: bytes) -> dict[str, Any]:
    """Return the part by which a worker is shown `data`."""
    return {"type": "image", "image": digest(data)}


def base64_source(data: bytes) -> dict[str, Any]:
    code = base64.b64encode(data).decode()
    return {"type": "base64", "media_type": "image/png", "data": code}


# How each dialect writes an image.
CHAT = [
    lambda data: {"type": "image_url", "image_url": {"url": data_url(data), "detail": "high"}},
    lambda data: {"type": "image_url", "image_url": data_url(data)},
]
RESPONSES = [lambda data: {"type": "input_image", "detail": "low", "image_url": data_url(data)}]
MESSAGES = [
    lambda data: {"type": "image", "source": base64_source(data)},
    lambda data: {"type": "image", "source": {"type": "url", "url": data_url(data)}},
]


def read(prompt: Prompt, images: ImageFetcher | None = None) -> Prompt:
    return asyncio.run(with_images(prompt, images or ImageFetcher(False), lambda _: None))


def refused(dialect: str, *rows: dict[str, Any], **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(prompt_of(dialect, *rows, **fields))
    assert caught.value.status == 400
    return caught.value


# ---------------------------------------------------------------- every form, everywhere


@pytest.mark.parametrize(
    ("dialect", "kind", "form"),
    [
        *(("chat", "text", form) for form in CHAT),
        *(("responses", "input_text", form) for form in RESPONSES),
        *(("messages", "text", form) for form in MESSAGES),
    ],
)
def test_images_of_any_turn_stand_among_the_texts_as_they_were_sent(
    dialect: str, kind: str, form: Any
) -> None:
    prompt = prompt_of(
        dialect,
        {"role": "user", "content": [text("a", kind), text("b", kind), form(ONE), form(TWO)]},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": [form(ONE), text("c", kind)]},
        {"role": "user", "content": [text("d", kind), text("e", kind)]},
    )
    assert shows_images(prompt)
    told = read(prompt)
    assert [row["content"] for row in told.messages] == [
        [text("a"), text("b"), shown(ONE), shown(TWO)],
        "ok",
        [shown(ONE), text("c")],
        [text("d"), text("e")],
    ]
    assert told.images == {digest(ONE): ONE, digest(TWO): TWO}
    rows = "input" if dialect == "responses" else "messages"
    assert told.places[digest(ONE)].startswith(f"{rows}[0].content[2].")
    assert told.places[digest(TWO)].startswith(f"{rows}[0].content[3].")


def chat_result(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": "c", "content": list(parts)}]


def messages_result(*parts: Any, **fields: Any) -> list[dict[str, Any]]:
    block = {"type": "tool_result", "tool_use_id": "c", "content": list(parts)} | fields
    return [{"role": "user", "content": [block]}]


def responses_result(*parts: Any, kind: str = "function_call_output") -> list[dict[str, Any]]:
    return [{"type": kind, "call_id": "c", "output": list(parts)}]


def custom_result(*parts: Any) -> list[dict[str, Any]]:
    return responses_result(*parts, kind="custom_tool_call_output")


@pytest.mark.parametrize(
    ("dialect", "result", "form"),
    [
        *(("chat", chat_result, form) for form in CHAT),
        *(("messages", messages_result, form) for form in MESSAGES),
        *(("responses", result, RESPONSES[0]) for result in (responses_result, custom_result)),
    ],
)
def test_images_of_tool_results_are_shown(dialect: str, result: Any, form: Any) -> None:
    (row,) = read(prompt_of(dialect, *result(text("a"), form(ONE), text("b"), text("c")))).messages
    assert row == {
        "role": "tool",
        "tool_call_id": "c",
        "content": [text("a"), shown(ONE), text("b"), text("c")],
    }
    (alone,) = read(prompt_of(dialect, *result(form(ONE)))).messages
    assert alone["content"] == [shown(ONE)]


@given(st.lists(st.text("ab\n", max_size=3) | st.just({"type": "image", "url": "u"}), max_size=6))
def test_joined_pieces_are_the_pieces(pieces: list[Any]) -> None:
    content = merge_texts(join(pieces))
    texts = [piece for piece in pieces if type(piece) is str]
    if len(texts) == len(pieces):
        assert content == join_text(texts)
        return
    assert type(content) is list
    assert sum(part["type"] == "image" for part in content) == len(pieces) - len(texts)
    runs = "\0".join(piece if type(piece) is str else "IMAGE" for piece in pieces)
    flat = "".join("IMAGE" if part["type"] == "image" else part["text"] for part in content)
    assert flat == runs.replace("\0IMAGE", "IMAGE").replace("IMAGE\0", "IMAGE").replace("\0", "\n")


def test_a_prompt_without_images_is_none_that_shows_any() -> None:
    assert not shows_images(prompt_of("chat", {"role": "user", "content": [text("a"), text("b")]}))
    assert not shows_images(Prompt([], text="raw"))


# ---------------------------------------------------------------- what is refused

BROKEN = "data:image/png;base64,x"


@pytest.mark.parametrize(
    ("dialect", "row", "code", "param"),
    [
        (
            "chat",
            {"role": "user", "content": [text("a"), {"type": "image_url", "image_url": BROKEN}]},
            "image_data_url",
            "messages[0].content[1].image_url",
        ),
        (
            "chat",
            {"role": "system", "content": [CHAT[0](ONE)]},
            "unsupported_content",
            "messages[0].content[0].image_url",
        ),
        (
            "chat",
            {"role": "developer", "content": [CHAT[0](ONE)]},
            "unsupported_content",
            "messages[0].content[0].image_url",
        ),
        (
            "chat",
            {"role": "user", "content": [{"type": "image", "source": base64_source(ONE)}]},
            "invalid_request",
            "messages[0].content[0].type",
        ),
        (
            "chat",
            {"role": "user", "content": [{"type": "image_url", "image_url": {"detail": "low"}}]},
            "invalid_request",
            "messages[0].content[0].image_url",
        ),
        (
            "chat",
            {"role": "tool", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]},
            "image_scheme",
            "messages[0].content[0].image_url",
        ),
        (
            "responses",
            {"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]},
            "unsupported_content",
            "input[0].content[0].file_id",
        ),
        (
            "responses",
            responses_result({"type": "input_image", "file_id": "file-1"})[0],
            "unsupported_content",
            "input[0].output[0].file_id",
        ),
        (
            "responses",
            {"role": "developer", "content": [RESPONSES[0](ONE)]},
            "unsupported_content",
            "input[0].content[0].image_url",
        ),
        (
            "responses",
            responses_result({"type": "input_image", "image_url": "https://a.example/b.png"})[0],
            "image_urls_off",
            "input[0].output[0].image_url",
        ),
        (
            "messages",
            {"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]},
            "unsupported_content",
            "messages[0].content[0].source",
        ),
        (
            "messages",
            {"role": "system", "content": [MESSAGES[0](ONE)]},
            "unsupported_content",
            "messages[0].content[0].source",
        ),
        (
            "messages",
            {"role": "assistant", "content": [MESSAGES[0](ONE)]},
            "unsupported_content",
            "messages[0].content[0].source",
        ),
        (
            "messages",
            messages_result({"type": "image", "source": base64_source(b"<svg>")})[0],
            "image_type",
            "messages[0].content[0].content[0].source",
        ),
    ],
)
def test_a_refusal_names_the_place(
    dialect: str, row: dict[str, Any], code: str, param: str
) -> None:
    error = refused(dialect, row)
    assert (error.code, error.param) == (code, param)
    assert param in str(error), "Messages' errors have no field for it"


def test_of_an_image_that_comes_twice_the_first_place_is_named() -> None:
    part = {"type": "image_url", "image_url": BROKEN}
    row = {"role": "user", "content": [text("a"), part, part]}
    assert refused("chat", row, row).param == "messages[0].content[1].image_url"


def test_one_image_too_many_is_refused_before_any_is_read() -> None:
    part = CHAT[0](ONE)
    most = {"role": "user", "content": [part] * IMAGES_MAX}
    assert len(read(prompt_of("chat", most)).messages[0]["content"]) == IMAGES_MAX
    with pytest.raises(RequestError, match=str(IMAGES_MAX)) as caught:
        read(prompt_of("chat", most, {"role": "user", "content": [part]}))
    assert (caught.value.code, caught.value.param) == (
        "too_many_images",
        "messages[1].content[0].image_url",
    )


def test_images_are_bounded_together_and_one_that_comes_twice_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_images, "IMAGES_BYTES_MAX", len(ONE) + len(TWO) - 1)
    again = data_url(ONE).replace("image/png", "image/any")  # another url, the same bytes
    other = {"type": "image_url", "image_url": again}
    twice = {"role": "user", "content": [CHAT[0](ONE), other]}
    held: list[int] = []
    told = asyncio.run(with_images(prompt_of("chat", twice), ImageFetcher(False), held.append))
    assert (told.images, held) == ({digest(ONE): ONE}, [len(ONE)])
    error = refused("chat", twice, {"role": "user", "content": [CHAT[0](TWO)]})
    assert (error.code, error.param) == ("images_too_large", "messages[1].content[0].image_url")
    assert f"{len(ONE) + len(TWO):,}" in str(error)


# ---------------------------------------------------------------- how they are read


class Slow(ImageFetcher):
    """Reads names as their own bytes, once `count` of them are asked for at once."""

    def __init__(self, count: int) -> None:
        super().__init__(True)
        self.asked: Counter[str] = Counter()
        self.ended: list[str] = []
        self._count = count
        self._all = asyncio.Event()

    async def read(self, url: str) -> NamedImage:
        self.asked[url] += 1
        if len(self.asked) == self._count:
            self._all.set()
        try:
            await self._all.wait()
        finally:
            self.ended.append(url)
        if url == "bad":
            raise RequestError("An image is bad.", code="image_type")
        return NamedImage(url.encode(), digest(url.encode()))


def named(*urls: str) -> Prompt:
    parts = [{"type": "image_url", "image_url": url} for url in urls]
    return prompt_of("chat", {"role": "user", "content": parts})


async def test_each_url_is_read_once_and_all_at_once() -> None:
    reader = Slow(3)
    told = await with_images(named("a", "b", "a", "c", "b"), reader, lambda _: None)
    assert reader.asked == {"a": 1, "b": 1, "c": 1}
    names = [part["image"] for part in told.messages[0]["content"]]
    assert names == [digest(url.encode()) for url in ("a", "b", "a", "c", "b")]


async def test_what_is_kept_of_images_takes_room_and_without_room_nothing_goes_on() -> None:
    held: list[int] = []
    await with_images(named("aa", "bbb", "aa"), Slow(2), held.append)
    assert sorted(held) == [2, 3]

    def no_room(count: int) -> None:
        raise Overloaded(f"no room for {count}")

    with pytest.raises(Overloaded):
        await with_images(named("aa"), Slow(1), no_room)


async def test_a_message_is_named_by_what_its_images_show_and_not_by_where_they_are(
    tmp_path: Path,
) -> None:
    body_parser = app_of(tmp_path).local.body_parser
    names, held = [], list[int]()
    for url in (data_url(ONE), data_url(ONE).replace("png", "any"), data_url(TWO)):
        content = [{"type": "image_url", "image_url": url}]
        body = {"messages": [{"role": "user", "content": content}]}
        request = await body_parser.complete(body_parser.parse("chat", body, {}), held.append)
        names.append(request.prompt.names)
    assert names[0] == names[1] != names[2]
    assert names[0][0].canonical != names[2][0].canonical
    assert held == [len(ONE), len(ONE), len(TWO)]


async def test_images_that_never_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_images, "IMAGES_WAIT_S_MAX", 0.01)

    class OneComes(Slow):
        async def read(self, url: str) -> NamedImage:
            return await (Slow(1) if url == "a" else super()).read(url)

    reader = OneComes(9)
    with pytest.raises(RequestError) as caught:
        await with_images(named("a", "b", "c"), reader, lambda _: None)
    assert (caught.value.status, caught.value.code) == (400, "images_too_slow")
    assert caught.value.param == "messages[0].content[1].image_url"
    assert sorted(reader.ended) == ["b", "c"]


async def test_a_client_that_leaves_and_a_refusal_end_all_fetches() -> None:
    reader = Slow(9)
    task = asyncio.create_task(with_images(named("a", "b"), reader, lambda _: None))
    while len(reader.asked) < 2:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(reader.ended) == ["a", "b"]

    class OneBad(Slow):
        async def read(self, url: str) -> NamedImage:
            return await super().read(url) if url != "bad" else await Slow(1).read(url)

    other = OneBad(9)
    with pytest.raises(RequestError) as caught:
        await with_images(named("a", "bad", "b"), other, lambda _: None)
    assert caught.value.param == "messages[0].content[1].image_url"
    assert sorted(other.ended) == ["a", "b"]
