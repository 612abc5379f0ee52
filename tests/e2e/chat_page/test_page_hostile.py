"""Has a model, its tools, files, names and imports write hostile markup: none of it becomes any.

The server sends no policy with the page, so that the page's own care is what is tested; and each of
the two things that care, the markdown library and the sanitiser, is tested without the other.
"""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.helpers.chat_page.chat_tab import ChatTab
from tests.helpers.chat_page.hostile_server import Delta, HostileServer, tool_call
from tests.helpers.chat_page.xss_payloads import PAYLOADS
from tests.helpers.clients.browser import NEEDS_CHROMIUM, page

pytestmark = NEEDS_CHROMIUM
SURVEY: Final = Path(__file__).parents[2] / "helpers" / "chat_page" / "page_survey.js"
IDS: Final = "[...document.querySelectorAll('[id]')].map((each) => each.id)"
# The canary: every document and frame has it, and tells it in the console, which `errors` keep.
CANARY: Final = "globalThis.hurt = () => console.error('hurt', location.href); 0"
STREAMED: Final = 30  # payloads of one streamed answer
PIECE_CHARS: Final = 23  # that come at once
ERRORS: Final = PAYLOADS[::24]
MESSAGES: Final = "document.querySelectorAll('.message').length"
# One of the two walls is taken away before the page's own modules run.
NO_MARKDOWN: Final = """import("/chat/vendor/markdown-it.esm.min.js").then((found) => {
  found.default.prototype.render = (text) => "<p>.</p>" + text;
})"""
NO_SANITISER: Final = """Object.defineProperty(window, "DOMPurify", {
  configurable: true, get: () => undefined,
  set: (library) => Object.defineProperty(window, "DOMPurify", {value: Object.assign(
    (...given) => library(...given), library,
    {sanitize: (text) => document.createRange().createContextualFragment(text)})}),
})"""


@dataclass
class Seen:
    """What one way to show the payloads came to."""

    shown: int = 0
    texts: list[str] = field(default_factory=list)  # where they must be read as they are
    strangers: list[str] = field(default_factory=list)  # elements and attributes of no list
    errors: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)  # but those that the page makes itself


class Watch:
    """Looks at a tab from its start on: what its page became, and what it asked for."""

    def __init__(self, chat: ChatTab) -> None:
        self.chat = chat
        self.ids: list[str] = []

    async def begin(self, *wall: str) -> None:
        for script in (CANARY, *wall):
            await self.chat.tab.before_load(script)
        await self.chat.open()
        self.ids = await self.chat.tab.value(IDS)
        await self.chat.tab.value(SURVEY.read_text())

    async def seen(self, texts: list[str]) -> Seen:
        tab = self.chat.tab
        await tab.value("new Promise((done) => setTimeout(done, 150))")  # for what loads late
        strangers = await tab.value(f"survey({json.dumps(self.ids)})")
        return Seen(
            await tab.value(MESSAGES),
            texts,
            strangers,
            list(tab.errors),
            list(tab.dialogs),
            [url for url in tab.requests if not self._is_own(url)],
        )

    def _is_own(self, url: str) -> bool:
        """Whether the page asks for it by itself: a file of its own, or what the API has for it."""
        own = self.chat.url
        place = url.removeprefix(own).partition("#")[0]
        files = ("chat/", "dashboard/format.js", "dashboard/icon.svg")
        is_known = place == "" or place.startswith(files)
        is_local = url.startswith(("data:image/png;", "blob:" + own))
        return is_local or (url.startswith(own) and is_known and "canary" not in url)


def conversation(nodes: list[dict[str, Any]], title: str) -> dict[str, Any]:
    """Return a conversation as the page exports it, of messages that follow one another."""
    rows, chosen, parent = {}, {}, "root"
    for number, node in enumerate(nodes):
        rows[f"n{number}"] = {"parent": parent, **node}
        chosen[parent] = parent = f"n{number}"
    settings = {"system": title, "model": title, "toolText": title}
    return {"title": title, "isNamed": True, "nodes": rows, "chosen": chosen, "settings": settings}


def turn(payload: str) -> list[dict[str, Any]]:
    """Return a question, its answer and a tool's result, with the payload in every text."""
    file = {"kind": "file", "name": payload, "size": 1, "data": "data:text/plain;base64,eA=="}
    svg = {"kind": "image", "name": payload, "size": 1, "data": "data:image/svg+xml;base64,PA=="}
    link = {"kind": "image", "name": payload, "size": 1, "data": "https://canary.invalid/a.png"}
    loss = {"cause": payload, "rule": payload, "lost": 3, "message": 1, "remedy": payload}
    cache = {"prefix_length": 1, "prefilled": 2, "ttft_ms": 3, "source": payload}
    answer = {
        **{"role": "assistant", "content": payload, "thinking": payload, "model": payload},
        **{"servedBy": payload, "finish": payload, "error": {"message": payload}},
        "calls": [{"id": payload, "name": payload, "text": payload}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "kv_cache": cache | {"divergence": loss},
        },
    }
    return [
        {"role": "user", "content": payload, "attachments": [file, svg, link]},
        answer,
        {"role": "tool", "content": payload, "callId": payload, "name": payload},
    ]


def exported(conversations: list[dict[str, Any]]) -> str:
    return json.dumps({"format": "hearth-chat", "version": 1, "conversations": conversations})


async def imported(devtools: str) -> Seen:
    """Import the payloads as a file that somebody sent, and open what is in it."""
    whole = conversation([node for payload in PAYLOADS for node in turn(payload)], "whole")
    titled = [conversation(turn("x")[:1], payload) for payload in PAYLOADS]
    async with HostileServer().running() as server, page(devtools) as tab:
        chat = ChatTab(tab, server.url)
        watch = Watch(chat)
        await watch.begin()
        await chat.import_text(exported([*titled, whole]))
        await tab.until("document.querySelectorAll('#conversations li').length >= 200")
        await tab.value("document.getElementById('search').value = 'whole'")
        await tab.value("document.getElementById('search').dispatchEvent(new Event('input'))")
        await tab.until("document.querySelector('#conversations .open')?.title === 'whole'")
        await tab.value("document.querySelector('#conversations .open').click()")
        await tab.until(f"{MESSAGES} === {3 * len(PAYLOADS)}")
        await tab.value(
            "document.querySelectorAll('details').forEach((each) => (each.open = true))"
        )
        await tab.value("document.getElementById('search').value = ''")
        await tab.value("document.getElementById('search').dispatchEvent(new Event('input'))")
        await tab.until("document.querySelectorAll('#conversations li').length >= 200")
        return await watch.seen(await chat.texts(".message[data-role=user] .body"))


async def answered(devtools: str, wall: str) -> Seen:
    """Open answers of the payloads, with one of the two walls away."""
    answers = [{"role": "assistant", "content": payload} for payload in PAYLOADS]
    async with HostileServer().running() as server, page(devtools) as tab:
        chat = ChatTab(tab, server.url)
        watch = Watch(chat)
        await watch.begin(wall)
        await chat.import_text(exported([conversation(answers, "answers")]))
        await tab.until("document.querySelector('#conversations .open') !== null")
        await tab.value("document.querySelector('#conversations .open').click()")
        await tab.until(f"{MESSAGES} === {len(PAYLOADS)}")
        return await watch.seen([])


def deltas(payloads: tuple[str, ...]) -> list[Delta]:
    """Return a stream that thinks, says and calls the payloads, in pieces of any kind."""
    text = "\n\n".join(payloads)
    pieces = [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
    thought: list[Delta] = [{"reasoning_content": piece} for piece in pieces[:40]]
    said: list[Delta] = [{"content": piece} for piece in pieces]
    return [*thought, *said, tool_call(payloads[0], json.dumps({"x": text}))]


async def streamed(devtools: str) -> Seen:
    """Have the model write the payloads, fail with them, and be named so itself."""
    server = HostileServer()
    server.models = [
        {"id": name, "object": "model", "owned_by": name, "root": name, "display_name": name}
        for name in ("model", *PAYLOADS)
    ]
    async with server.running(), page(devtools) as tab:
        chat = ChatTab(tab, server.url)
        watch = Watch(chat)
        await watch.begin()
        for first in range(0, len(PAYLOADS), STREAMED):
            server.answers.append(deltas(PAYLOADS[first : first + STREAMED]))
            await chat.new()
            await chat.send("Go on.")
            await tab.until("document.querySelector('.result-text') !== null")
        for error in ERRORS:
            server.answers.append(error)
            await chat.new()
            await chat.say("Go on.")
        tab.errors = [each for each in tab.errors if "status of 400" not in each]
        await chat.new()
        await chat.attach(*((name, "text/plain", name) for name in PAYLOADS))
        await tab.until(f"document.querySelectorAll('#attachments li').length === {len(PAYLOADS)}")
        await chat.say("See these.")
        names = await chat.texts("#model option")
        return await watch.seen(names)


def assert_harmless(seen: Seen) -> None:
    assert seen.strangers == []
    assert seen.requests == []
    assert seen.dialogs == []
    assert seen.errors == []


def test_there_are_enough_payloads_and_no_two_are_one() -> None:
    assert len(PAYLOADS) == len(set(PAYLOADS)) >= 250


def test_a_file_of_hostile_conversations_is_shown_as_text(devtools: str) -> None:
    seen = asyncio.run(imported(devtools))
    assert seen.shown == 3 * len(PAYLOADS)
    assert [text.strip() for text in seen.texts] == [
        payload.replace("\r\n", "\n").strip() for payload in PAYLOADS
    ]
    assert_harmless(seen)


def test_a_hostile_model_fails_to_run_or_load_anything_while_it_streams(devtools: str) -> None:
    seen = asyncio.run(streamed(devtools))
    assert len(seen.texts) > 250, "the models' names are there to choose"
    assert_harmless(seen)


@pytest.mark.parametrize("wall", [NO_MARKDOWN, NO_SANITISER], ids=["sanitiser", "markdown"])
def test_each_of_the_two_walls_holds_alone(devtools: str, wall: str) -> None:
    seen = asyncio.run(answered(devtools, wall))
    assert seen.shown == len(PAYLOADS)
    assert_harmless(seen)
