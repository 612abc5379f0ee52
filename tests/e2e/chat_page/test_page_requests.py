"""Uses the page to talk in ways that show what it sends, and has its answers fail or wait.

The server is a small one of the test's own, so that each answer is of the test's choice.
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from scripts.harness.image_files import painted
from tests.helpers.chat_page.chat_tab import STATE, ChatTab
from tests.helpers.chat_page.hostile_server import HostileServer, tool_call
from tests.helpers.clients.browser import NEEDS_CHROMIUM, page

pytestmark = NEEDS_CHROMIUM
TOOL: Final = {
    "name": "lookup",
    "description": "Looks a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}
# A paste and a drop as a browser gives them, of a file that the script makes of bytes in base64.
GIVE: Final = """((kind, at, data) => {
  const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
  const given = new DataTransfer();
  given.items.add(new File([bytes], "given.png", {type: "image/png"}));
  const more = {bubbles: true, cancelable: true};
  document.getElementById(at).dispatchEvent(kind === "paste"
    ? new ClipboardEvent("paste", {clipboardData: given, ...more})
    : new DragEvent("drop", {dataTransfer: given, ...more}));
})(%s)"""
PARAGRAPHS: Final = 300  # of a long answer
PARAGRAPH: Final = (
    "A paragraph of a long answer with `code` and **weight**, number {}, of some length.\n\n"
)


def model(name: str, *inputs: str) -> dict[str, Any]:
    architecture = {"input_modalities": list(inputs), "output_modalities": ["text"]}
    return {"id": name, "object": "model", "owned_by": "hearth", "architecture": architecture}


@asynccontextmanager
async def opened(devtools: str) -> AsyncIterator[tuple[ChatTab, HostileServer]]:
    server = HostileServer()
    server.models = [model("reads", "text"), model("looks", "text", "image")]
    async with server.running(), page(devtools) as tab:
        chat = ChatTab(tab, server.url)
        await chat.open()
        yield chat, server


def run(devtools: str, test: Callable[[ChatTab, HostileServer], Awaitable[Any]]) -> Any:
    """Return what `test` gives, whose page must have kept its console clean."""

    async def whole() -> Any:
        async with opened(devtools) as (chat, server):
            given = await test(chat, server)
            assert [each for each in chat.tab.errors if "Failed to load" not in each] == []
            return given

    return asyncio.run(whole())


async def choose_model(chat: ChatTab, name: str) -> None:
    await chat.tab.value(
        f"((select) => {{ select.value = {json.dumps(name)};"
        " select.dispatchEvent(new Event('change', {bubbles: true})); })"
        "(document.getElementById('model'))"
    )


def test_a_picture_comes_by_choice_paste_and_drop_and_goes_as_openai_has_it(
    devtools: str, artefacts: Path | None, tmp_path: Path
) -> None:
    file = tmp_path / "dunes.png"
    painted(3, (320, 200)).save(file)
    data = base64.b64encode(file.read_bytes()).decode()

    async def test(chat: ChatTab, server: HostileServer) -> list[Any]:
        await choose_model(chat, "looks")
        await chat.tab.choose("#file", file)
        for kind, at in (("paste", "prompt"), ("drop", "main")):
            await chat.tab.value(GIVE % json.dumps([kind, at, data])[1:-1])
        await chat.tab.until("document.querySelectorAll('#attachments img').length === 3")
        for _ in range(2):
            await chat.tab.value("document.querySelector('#attachments .remove').click()")
        await chat.tab.until("document.querySelectorAll('#attachments img').length === 1")
        server.answers.append([{"content": "It shows a pattern of colours."}])
        await chat.say("What is this?")
        await chat.shoot(artefacts, "image")
        seen = await chat.tab.value(
            "[...document.querySelectorAll('.message img')].map((each) =>"
            " [each.naturalWidth, each.alt])"
        )
        return [seen, server.bodies[-1]["messages"][-1]["content"]]

    seen, content = run(devtools, test)
    assert seen == [[320, "given.png"]]
    picture, text = content
    assert picture == {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{data}"},
    }
    assert text == {"type": "text", "text": "What is this?"}


def test_a_model_that_takes_text_only_is_given_no_picture_and_the_page_says_why(
    devtools: str,
) -> None:
    async def test(chat: ChatTab, server: HostileServer) -> list[Any]:
        await chat.attach(("a.png", "image/png", "x"), ("b.txt", "text/plain", "Words."))
        await chat.tab.until("document.querySelectorAll('#attachments li').length === 1")
        told = await chat.texts("#toast, #image-note")
        await chat.say("Read this.")
        return [told, server.bodies[-1]["messages"][-1]["content"]]

    told, content = run(devtools, test)
    assert all("reads takes text only" in each for each in told)
    words = base64.b64encode(b"Words.").decode()
    assert content[0]["type"] == "file"
    assert content[0]["file"]["filename"] == "b.txt"
    assert content[0]["file"]["file_data"].endswith(words)


def test_a_failed_request_says_why_and_is_asked_again_with_all_that_was_written(
    devtools: str,
) -> None:
    why = "The prompt is 41,200 tokens and this server accepts 32,768."

    async def test(chat: ChatTab, server: HostileServer) -> list[Any]:
        server.answers += [why, [{"content": "Half an "}, {}], [{"content": "All of it."}]]
        await chat.say("A question")
        told = [await chat.texts(".error p")]
        await chat.tab.click(".retry")
        await chat.answered()
        told += [await chat.texts(".error p"), await chat.shown()]
        await chat.tab.click(".retry")
        await chat.answered()
        return [*told, await chat.shown(), await chat.texts(".error p"), server.bodies]

    refused, cut, half, whole, left, bodies = run(devtools, test)
    assert refused == [why]
    assert len(cut) == 1 and half[-1] == ("assistant", "Half an"), "what came stays"
    assert whole == [("user", "A question"), ("assistant", "All of it.")] and left == []
    assert [body["messages"] for body in bodies] == 3 * [
        [{"role": "user", "content": "A question"}]
    ]


def test_a_developers_own_tool_is_offered_and_answered_by_hand(devtools: str) -> None:
    async def test(chat: ChatTab, server: HostileServer) -> list[Any]:
        await chat.tab.click("#open-settings")
        settings = {"system": "Be brief.", "temperature": "0.5", "max-tokens": "64"}
        settings |= {"thinking": "off", "tool-text": json.dumps([TOOL])}
        await chat.tab.value(
            f"for (const [id, text] of Object.entries({json.dumps(settings)}))"
            " document.getElementById(id).value = text"
        )
        await chat.tab.value("document.getElementById('settings-form').requestSubmit()")
        server.answers.append([tool_call("lookup", '{"word": "fox"}')])
        server.answers.append([{"content": "An animal."}])
        await chat.send("What is a fox?")
        await chat.tab.until("document.querySelector('.result-text') !== null")
        await chat.tab.value("document.querySelector('.result-text').focus()")
        await chat.tab.write("fox: an animal")
        await chat.tab.click(".send-results")
        await chat.tab.until("document.querySelectorAll('.message').length === 4")
        await chat.answered()
        return [server.bodies, await chat.shown()]

    (first, second), shown = run(devtools, test)
    given = {name: first[name] for name in ("temperature", "max_tokens", "enable_thinking")}
    assert given == {"temperature": 0.5, "max_tokens": 64, "enable_thinking": False}
    assert first["tools"] == [{"type": "function", "function": TOOL}]
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    call, result = second["messages"][-2:]
    assert call["tool_calls"][0]["function"] == {"name": "lookup", "arguments": '{"word": "fox"}'}
    assert result == {
        "role": "tool",
        "tool_call_id": call["tool_calls"][0]["id"],
        "content": "fox: an animal",
    }
    assert shown[-1] == ("assistant", "An animal.")


def test_thinking_is_open_while_it_comes_and_only_a_whole_answer_is_told_to_screen_readers(
    devtools: str,
) -> None:
    look = f"[document.querySelector('.thinking').open, {STATE}]"

    async def test(chat: ChatTab, server: HostileServer) -> list[Any]:
        told = []
        for channel in ("reasoning_content", "content"):
            server.hold.clear()
            server.answers.append([{"reasoning_content": "First: "}, {channel: "Half of it"}])
            await chat.new()
            await chat.send("A question")
            # The text of what is folded is no inner text.
            await chat.tab.until(
                "document.getElementById('messages').innerText.includes('Half of it')"
                " || document.querySelector('.thinking:not([hidden]):not([open])') !== null"
            )
            told.append(await chat.tab.value(look))
            server.hold.set()
            await chat.answered()
            told.append(await chat.tab.value(look))
        return told

    thinks, thought, says, said = run(devtools, test)
    assert (thinks[0], thought[0], says[0], said[0]) == (True, False, False, False)
    assert "Half" not in says[1] and said[1] == "Answer: Half of it"


def test_of_a_long_answer_only_what_comes_is_drawn_anew(devtools: str) -> None:
    async def test(chat: ChatTab, server: HostileServer) -> list[Any]:
        server.hold.clear()
        server.answers.append(
            [{"content": PARAGRAPH.format(number)} for number in range(PARAGRAPHS)]
        )
        await chat.tab.value(
            "new MutationObserver((changes) => { for (const change of changes)"
            " window.removed = (window.removed ?? 0) + change.removedNodes.length; })"
            ".observe(document.getElementById('messages'), {childList: true, subtree: true}); 0"
        )
        await chat.send("All of it.")
        await chat.tab.until(f"document.querySelectorAll('.body p').length >= {PARAGRAPHS}")
        await chat.tab.value("document.querySelector('.body p').isFirst = true")
        drawn = await chat.tab.value("window.removed")
        server.hold.set()
        await chat.answered()
        kept = await chat.tab.value("document.querySelector('.body p').isFirst === true")
        return [drawn, kept, await chat.tab.value("document.querySelectorAll('.body p').length")]

    removed, is_kept, count = run(devtools, test)
    assert is_kept and count == PARAGRAPHS
    assert removed < PARAGRAPHS, "blocks that are whole are not drawn again"
