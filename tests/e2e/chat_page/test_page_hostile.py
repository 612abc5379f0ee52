"""Has a model, its tools, files, names and imports write hostile markup: none of it becomes any.

The server sends no policy with the page, so that the page's own care is what is tested; and each of
the two things that care, the markdown library and the sanitiser, is tested without the other.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
ALL_LISTED: Final = "document.querySelectorAll('#conversations li').length >= 200"
NONE: Final[dict[str, list[str]]] = {
    **{"strangers": [], "requests": [], "dialogs": [], "errors": []},
}
MESSAGES: Final = "document.querySelectorAll('.message').length"
# One of the two walls is taken away before the page's own modules run.
NO_MARKDOWN: Final = """import("/chat/vendor/markdown-it.esm.min.js").then((found) => {
  const html = {type: "html_block", level: 0, nesting: 0, map: [0, 1], attrs: null};
  found.default.prototype.parse = (text) => [{...html, content: "<p>.</p>" + text}];
})"""
NO_SANITISER: Final = """Object.defineProperty(window, "DOMPurify", {
  configurable: true, get: () => undefined,
  set: (library) => Object.defineProperty(window, "DOMPurify", {value: Object.assign(
    (...given) => library(...given), library,
    {sanitize: (text) => document.createRange().createContextualFragment(text)})}),
})"""


def is_own(chat: ChatTab, url: str) -> bool:
    """Whether the page asks for it by itself: a file of its own, or what the API has for it."""
    place = url.removeprefix(chat.url).partition("#")[0]
    is_known = place.startswith(("chat/", "dashboard/format.js", "dashboard/icon.svg"))
    is_here = url.startswith(chat.url) and (place == "" or is_known) and "canary" not in url
    return is_here or url.startswith(("data:image/png;", "blob:" + chat.url))


@asynccontextmanager
async def watched(
    devtools: str, server: HostileServer, harm: dict[str, Any], *wall: str
) -> AsyncIterator[ChatTab]:
    """Give the open page, without `wall`; `harm` has in the end what was done to it."""
    async with server.running(), page(devtools) as tab:
        chat = ChatTab(tab, server.url)
        for script in (CANARY, *wall):
            await tab.before_load(script)
        await chat.open()
        ids = await tab.value(IDS)
        await tab.value(SURVEY.read_text())
        yield chat
        await tab.value("new Promise((done) => setTimeout(done, 150))")  # for what loads late
        harm["strangers"] = await tab.value(f"survey({json.dumps(ids)})")
        harm["requests"] = [url for url in tab.requests if not is_own(chat, url)]
        harm["dialogs"] = list(tab.dialogs)
        harm["errors"] = [each for each in tab.errors if "status of 400" not in each]


async def opened(chat: ChatTab, title: str, count: int) -> None:
    """Open the conversation of this title, of so many messages, with all that is folded."""
    await search(chat, title)
    await chat.tab.until(f"document.querySelector('#conversations .open')?.title === '{title}'")
    await chat.tab.value("document.querySelector('#conversations .open').click()")
    await chat.tab.until(f"{MESSAGES} === {count}")
    await chat.tab.value("document.querySelectorAll('details').forEach((e) => (e.open = true))")


async def search(chat: ChatTab, text: str) -> None:
    await chat.tab.value(
        f"((at) => {{ at.value = '{text}'; at.dispatchEvent(new Event('input')); }})"
        "(document.getElementById('search'))"
    )


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


def deltas(payloads: tuple[str, ...]) -> list[Delta]:
    """Return a stream that thinks, says and calls the payloads, in pieces of any kind."""
    text = "\n\n".join(payloads)
    pieces = [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
    thought: list[Delta] = [{"reasoning_content": piece} for piece in pieces[:40]]
    said: list[Delta] = [{"content": piece} for piece in pieces]
    return [*thought, *said, tool_call(payloads[0], json.dumps({"x": text}))]


def test_a_file_of_hostile_conversations_is_shown_as_text(devtools: str) -> None:
    """As somebody sent it: a conversation of all payloads, and one that each is the title of."""
    whole = conversation([node for payload in PAYLOADS for node in turn(payload)], "whole")
    titled = [conversation(turn("x")[:1], payload) for payload in PAYLOADS]
    harm: dict[str, Any] = {}

    async def shown() -> list[str]:
        async with watched(devtools, HostileServer(), harm) as chat:
            await chat.import_text(exported([*titled, whole]))
            await chat.tab.until(ALL_LISTED)
            await opened(chat, "whole", 3 * len(PAYLOADS))
            await search(chat, "")
            await chat.tab.until(ALL_LISTED)
            return await chat.texts(".message[data-role=user] .body")

    texts = [text.strip() for text in asyncio.run(shown())]
    assert texts == [payload.replace("\r\n", "\n").strip() for payload in PAYLOADS]
    assert harm == NONE


def test_a_hostile_model_fails_to_run_or_load_anything_while_it_streams(devtools: str) -> None:
    """It writes the payloads, fails with them, and is named so itself; files have such names."""
    names = ({"id": name, "owned_by": name, "display_name": name} for name in PAYLOADS)
    server, harm = HostileServer({"id": "model"}, *names), dict[str, Any]()

    async def shown() -> list[str]:
        async with watched(devtools, server, harm) as chat:
            for first in range(0, len(PAYLOADS), STREAMED):
                server.answers.append(deltas(PAYLOADS[first : first + STREAMED]))
                await chat.new()
                await chat.send("Go on.")
                await chat.tab.until("document.querySelector('.result-text') !== null")
            for error in ERRORS:
                server.answers.append(error)
                await chat.new()
                await chat.say("Go on.")
            await chat.new()
            await chat.attach(*((name, "text/plain", name) for name in PAYLOADS))
            await chat.tab.until(
                f"document.querySelectorAll('#attachments li').length === {len(PAYLOADS)}"
            )
            await chat.say("See these.")
            return await chat.texts("#model option")

    assert len(asyncio.run(shown())) > 250, "the models' names are there to choose"
    assert harm == NONE


@pytest.mark.parametrize("wall", [NO_MARKDOWN, NO_SANITISER], ids=["sanitiser", "markdown"])
def test_each_of_the_two_walls_holds_alone(devtools: str, wall: str) -> None:
    answers = [{"role": "assistant", "content": payload} for payload in PAYLOADS]
    harm: dict[str, Any] = {}

    async def shown() -> None:
        async with watched(devtools, HostileServer(), harm, wall) as chat:
            await chat.import_text(exported([conversation(answers, "answers")]))
            await opened(chat, "answers", len(PAYLOADS))

    asyncio.run(shown())
    assert harm == NONE
