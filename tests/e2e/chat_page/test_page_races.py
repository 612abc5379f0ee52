"""Has several things happen to the page at once, and looks for words that are lost by it."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.helpers.chat_page.chat_tab import ChatTab
from tests.helpers.chat_page.hostile_server import HostileServer, tool_call
from tests.helpers.clients.browser import NEEDS_CHROMIUM, WAIT_S_MAX, page

pytestmark = [NEEDS_CHROMIUM, pytest.mark.browser]
AtPage = Callable[..., Any]
ROWS: Final = "document.querySelectorAll('#conversations li').length"
MESSAGES: Final = "document.querySelectorAll('.message').length"
FOCUSED: Final = "document.activeElement.id || document.activeElement.className"
EDIT: Final = ".message[data-role=user] .edit"
RESULTS: Final = "document.querySelectorAll('.result-text')"
# The messages of all conversations, as IndexedDB has them.
KEPT: Final = """import('/chat/store.js').then((store) => store.all())
  .then((all) => all.flatMap((each) => Object.values(each.nodes)))"""
TWO_CALLS: Final[list[Any]] = [
    {"tool_calls": [{"index": 7, "id": "a", "function": {"name": "first", "arguments": ""}}]},
    {"tool_calls": [{"index": "__proto__", "id": "b", "function": {"name": "second"}}]},
    {"tool_calls": [{"index": "__proto__", "function": {"arguments": '{"x": 1}'}}]},
]
# What highlight.js needs 12 s for, and what it colours at once.
ENDLESS: Final = "```csharp\n" + ("function " * 30 + "\n") * 180 + "```"
USUAL: Final = "```csharp\npublic class Fox {}\n```"
COLOURED: Final = """[...document.querySelectorAll('pre > code')].map(
  (each) => each.childElementCount > 0)"""
# Blocks whose kind, or whose links, only what comes later tells.
LATE: Final = "- a\n---b\n\n> [a]: http://a.example/\n\n[a]\n\na | b\n--|--\n1 | 2\n\nc\n===\r\n"
DRAWN: Final = """import("/chat/markdown.js").then(({ MarkdownView }) => {
  const text = %s;
  const [grown, whole] = [document.createElement("div"), document.createElement("div")];
  const view = new MarkdownView(grown);
  for (let end = 1; end <= text.length; end += 1) view.update(text.slice(0, end));
  view.finish(text);
  new MarkdownView(whole).finish(text);
  return [grown.innerHTML, whole.innerHTML];
})"""
BLOCKED: Final = """
  indexedDB.open = () => { throw new DOMException("Blocked.", "SecurityError"); };
  Storage.prototype.setItem = () => { throw new DOMException("Full.", "QuotaExceededError"); };
"""


async def begins(chat: ChatTab, server: HostileServer, text: str) -> None:
    """Send a question whose answer does not end before `server.hold` is set."""
    before = await chat.tab.value(MESSAGES)
    server.hold.clear()
    await chat.send(text)
    await chat.tab.until(f"{MESSAGES} === {before + 2}")


async def ends(chat: ChatTab, server: HostileServer) -> None:
    server.hold.set()
    await chat.answered()


async def keeps(chat: ChatTab, answers: int) -> None:
    """Wait until both tabs have kept what was answered."""
    async with asyncio.timeout(WAIT_S_MAX):
        while [node.get("isRunning") for node in await chat.tab.value(KEPT)].count(False) < answers:
            await asyncio.sleep(0.05)


def test_two_tabs_write_into_one_conversation_and_neither_loses_a_word(
    at_page: AtPage, devtools: str
) -> None:
    async def steps(one: ChatTab, server: HostileServer) -> list[Any]:
        await one.say("base")
        await one.tab.until(f"{ROWS} === 1")
        where = await one.tab.value("location.href")
        async with page(devtools, one.tab.profile) as tab:
            two = ChatTab(tab, where)
            await two.open()
            await tab.until(f"{MESSAGES} === 2")
            await begins(one, server, "from one")  # and both answer at the same time
            await begins(two, server, "from two")
            await ends(one, server)
            await two.answered()
            await two.say("once more")
            await keeps(two, 4)
            await one.reload()
            await one.tab.until(f"{MESSAGES} > 2")
            kept = await one.tab.value(KEPT)
            await two.press("#conversations .delete")
            await one.tab.until(f"{ROWS} === 0 && {MESSAGES} === 0")
            await one.tab.value(
                "document.getElementById('model').dispatchEvent(new Event('change'))"
            )
            await asyncio.sleep(0.2)  # in which it would come back
            return [kept, await one.tab.value(ROWS)]

    nodes, left = at_page(steps)
    asked = sorted(node["content"] for node in nodes if node["role"] == "user")
    assert asked == ["base", "from one", "from two", "once more"]
    answers = [node for node in nodes if node["role"] == "assistant"]
    assert [(node["content"], node["isStopped"]) for node in answers] == 4 * [("Yes.", False)]
    assert left == 0, "what another tab deleted stays so"


def test_what_is_typed_or_chosen_amid_an_answer_waits_for_its_end(at_page: AtPage) -> None:
    async def steps(chat: ChatTab, server: HostileServer) -> list[Any]:
        await chat.say("first")
        await chat.press(".regenerate")
        await chat.tab.until("document.querySelector('.branch-number') !== null")
        await chat.answered()
        await begins(chat, server, "second")
        await chat.press(EDIT)
        await chat.tab.write(", changed")
        await chat.tab.press("Enter", "\r")
        told = await chat.texts("#toast span")
        await chat.press(".branch-previous")
        await ends(chat, server)
        left = await chat.tab.value("document.querySelector('.edit-text')?.value")
        feet = await chat.texts(".message:first-child .foot button")
        number = await chat.texts(".branch-number")
        await chat.press(".edit-send")
        await chat.tab.until(f"{MESSAGES} === 2")
        await chat.answered()
        return [told[0], left, feet, number, await chat.shown()]

    told, left, feet, number, shown = at_page(steps)
    assert "An answer is being written" in told and left == "first, changed"
    assert feet == [], "one edit at a time"
    assert number == ["2/2"], "the answer that was written is not hidden by a branch"
    assert shown == [("user", "first, changed"), ("assistant", "Yes.")]


def test_calls_that_nobody_answered_are_not_sent_and_others_numbers_of_calls_do_no_harm(
    at_page: AtPage,
) -> None:
    async def steps(chat: ChatTab, server: HostileServer) -> list[Any]:
        server.answers += [[{"content": "I look."}, tool_call("lookup", '{"wor')], TWO_CALLS]
        server.hold.clear()
        await chat.send("A question")
        await chat.tab.until("document.querySelector('.tool-call') !== null")
        await chat.tab.press("Escape")
        await ends(chat, server)
        await chat.send("Another")
        await chat.tab.until(f"{RESULTS}.length === 2")
        await chat.tab.value(f"{RESULTS}.forEach((each) => (each.value = 'none'))")
        await chat.press(".send-results")
        await chat.tab.until("document.querySelectorAll('.tool-result').length === 2")
        await chat.answered()
        polluted = await chat.tab.value("'name' in Array.prototype || 'text' in []")
        return [polluted, *(body["messages"] for body in server.bodies[1:])]

    is_polluted, second, third = at_page(steps)
    assert not is_polluted
    said, asked = {"role": "assistant", "content": "I look."}, {"role": "user"}
    assert second[1:] == [said, asked | {"content": "Another"}]
    assert [(each["id"], each["function"]) for each in third[3]["tool_calls"]] == [
        ("a", {"name": "first", "arguments": "{}"}),
        ("b", {"name": "second", "arguments": '{"x": 1}'}),
    ]


def test_the_focus_is_lost_by_nothing_that_is_done_with_the_keyboard(at_page: AtPage) -> None:
    async def steps(chat: ChatTab, server: HostileServer) -> dict[str, str]:
        focus = {}
        server.hold.clear()
        await chat.write("one")
        await chat.press("#send")
        await chat.tab.until(f"{MESSAGES} === 2")
        focus["send"] = await chat.tab.value(FOCUSED)
        await chat.press("#stop")
        await ends(chat, server)
        focus["stop"] = await chat.tab.value(FOCUSED)
        server.answers.append("No.")
        for buttons in ([".regenerate"], [".retry"], [EDIT, ".edit-send"]):
            for button in buttons:
                await chat.press(button)
            await chat.answered()
            focus[buttons[0]] = await chat.tab.value(FOCUSED)
        await chat.new()
        await chat.say("two")
        await chat.tab.until(f"{ROWS} === 2")
        await chat.press("#conversations li:last-child .delete")
        await chat.tab.until(f"{ROWS} === 1")
        focus["delete"] = await chat.tab.value(FOCUSED)
        await chat.tab.value("document.querySelector('#conversations .rename').isSame = true")
        await begins(chat, server, "three")
        await chat.tab.value("document.querySelector('#conversations .rename').focus()")
        await ends(chat, server)
        await asyncio.sleep(0.2)  # until it is kept, and the list looked at again
        focus["list"] = await chat.tab.value(f"[{FOCUSED}, document.activeElement.isSame]")
        return focus

    assert at_page(steps) == {
        **{"send": "prompt", "stop": "prompt"},
        **{".regenerate": "message", ".retry": "message", EDIT: "message"},
        **{"delete": "open", "list": ["small rename", True]},
    }


def test_a_block_of_code_that_is_long_enough_to_stop_the_page_has_no_colours(
    at_page: AtPage,
) -> None:
    async def steps(chat: ChatTab, server: HostileServer) -> Any:
        server.answers.append([{"content": f"{ENDLESS}\n\n{USUAL}"}])
        await chat.say("Write code.")
        await chat.tab.until("document.querySelectorAll('.hljs-keyword').length > 0")
        return await chat.tab.value(COLOURED)

    assert at_page(steps) == [False, True]


def test_an_answer_that_came_letter_by_letter_looks_as_it_does_once_it_is_opened_again(
    at_page: AtPage,
) -> None:
    async def steps(chat: ChatTab, _: HostileServer) -> Any:
        return await chat.tab.value(DRAWN % json.dumps(LATE))

    grown, whole = at_page(steps)
    assert "a.example" in whole and "<h1" in whole
    assert grown == whole


def test_a_file_goes_with_the_message_that_it_was_given_to_and_waits_with_its_draft(
    at_page: AtPage,
) -> None:
    async def steps(chat: ChatTab, server: HostileServer) -> list[Any]:
        await chat.write("Read it.")
        await chat.attach(("a.txt", "text/plain", "Words."))
        await chat.tab.value("document.getElementById('composer').requestSubmit()")  # at once
        await chat.tab.until(f"{MESSAGES} === 2 && {ROWS} === 1")
        await chat.answered()
        await chat.attach(("b.txt", "text/plain", "More."))
        await chat.tab.until("document.querySelectorAll('#attachments li').length === 1")
        await chat.new()
        waits = [await chat.texts("#attachments .file-name")]
        await chat.press("#conversations .open")
        await chat.tab.until(f"{MESSAGES} === 2")
        waits.append(await chat.texts("#attachments .file-name"))
        return [[part["type"] for part in server.bodies[0]["messages"][0]["content"]], *waits]

    assert at_page(steps) == [["file", "text"], [], ["b.txt"]]


def test_where_a_browser_keeps_nothing_the_page_talks_all_the_same(at_page: AtPage) -> None:
    async def steps(chat: ChatTab, _: HostileServer) -> list[Any]:
        await chat.press("#open-settings")
        await chat.press("#settings-save")
        await chat.tab.until("document.querySelector('dialog[open]') === null")
        return [await chat.say("A question"), (await chat.texts("#toast"))[0]]

    answer, told = at_page(steps, before=BLOCKED)
    assert answer == "Yes." and "could not be kept: Blocked." in told
