"""Uses the page to talk in ways that show what it sends, and has its answers fail or wait.

The server is a small one of the test's own, so that each answer is of the test's choice.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from scripts.harness.image_files import painted
from tests.helpers.chat_page.chat_tab import STATE, ChatTab
from tests.helpers.chat_page.hostile_server import HostileServer, tool_call
from tests.helpers.clients.browser import NEEDS_CHROMIUM

pytestmark = NEEDS_CHROMIUM
AtPage = Callable[..., Any]
TOOL: Final = {
    "name": "lookup",
    "description": "Looks a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}
SETTINGS: Final = {
    **{"system": "Be brief.", "temperature": "0.5", "max-tokens": "64", "thinking": "off"},
    "tool-text": json.dumps([TOOL]),
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
CHOOSE: Final = """((select) => {
  select.value = "looks";
  select.dispatchEvent(new Event("change", {bubbles: true}));
})(document.getElementById("model"))"""
SEEN: Final = "[...document.querySelectorAll('.message img')].map((e) => [e.naturalWidth, e.alt])"
COUNT_REMOVED: Final = """new MutationObserver((changes) => { for (const change of changes)
  window.removed = (window.removed ?? 0) + change.removedNodes.length; })
  .observe(document.getElementById("messages"), {childList: true, subtree: true}); 0"""
PICTURES: Final = "document.querySelectorAll('#attachments img').length"
PARAGRAPHS: Final = 300  # of a long answer
PARAGRAPH: Final = "A paragraph with `code` and **weight**, number {}, of some length.\n\n"
WHY: Final = "The prompt is 41,200 tokens and this server accepts 32,768."


def model(name: str, *inputs: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "architecture": {"input_modalities": list(inputs)}}


def test_a_picture_comes_by_choice_paste_and_drop_and_goes_as_openai_has_it(
    at_page: AtPage, tmp_path: Path
) -> None:
    file = tmp_path / "dunes.png"
    painted(3, (320, 200)).save(file)
    data = base64.b64encode(file.read_bytes()).decode()

    async def steps(chat: ChatTab, server: HostileServer) -> list[Any]:
        await chat.tab.value(CHOOSE)
        await chat.tab.choose("#file", file)
        for kind, at in (("paste", "prompt"), ("drop", "main")):
            await chat.tab.value(GIVE % json.dumps([kind, at, data])[1:-1])
        await chat.tab.until(f"{PICTURES} === 3")
        for _ in range(2):
            await chat.tab.value("document.querySelector('#attachments .remove').click()")
        await chat.tab.until(f"{PICTURES} === 1")
        await chat.say("What is this?")
        return [await chat.tab.value(SEEN), server.bodies[-1]["messages"][-1]["content"]]

    assert at_page(steps, model("reads", "text"), model("looks", "text", "image")) == [
        [[320, "given.png"]],
        [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
            {"type": "text", "text": "What is this?"},
        ],
    ]


def test_a_model_that_takes_text_only_is_given_no_picture_and_the_page_says_why(
    at_page: AtPage,
) -> None:
    async def steps(chat: ChatTab, server: HostileServer) -> list[Any]:
        await chat.attach(("a.png", "image/png", "x"), ("b.txt", "text/plain", "Words."))
        await chat.tab.until("document.querySelectorAll('#attachments li').length === 1")
        told = await chat.texts("#toast, #image-note")
        await chat.say("Read this.")
        return [told, server.bodies[-1]["messages"][-1]["content"]]

    told, (file, _) = at_page(steps, model("reads", "text"))
    assert all("reads takes text only" in each for each in told)
    assert (file["type"], file["file"]["filename"]) == ("file", "b.txt")
    assert file["file"]["file_data"].endswith(base64.b64encode(b"Words.").decode())


def test_a_failed_request_says_why_and_is_asked_again_with_all_that_was_written(
    at_page: AtPage,
) -> None:
    async def steps(chat: ChatTab, server: HostileServer) -> list[Any]:
        server.answers += [WHY, [{"content": "Half an "}, {}], [{"content": "All of it."}]]
        await chat.say("A question")
        told: list[Any] = [await chat.texts(".error p")]
        for _ in range(2):
            await chat.tab.click(".retry")
            await chat.answered()
            told += [await chat.texts(".error p"), await chat.shown()]
        return [*told, [body["messages"] for body in server.bodies]]

    refused, cut, half, left, whole, asked = at_page(steps)
    assert refused == [WHY]
    assert len(cut) == 1 and half[-1] == ("assistant", "Half an"), "what came stays"
    assert whole == [("user", "A question"), ("assistant", "All of it.")] and left == []
    assert asked == 3 * [[{"role": "user", "content": "A question"}]]


def test_a_developers_own_tool_is_offered_and_answered_by_hand(at_page: AtPage) -> None:
    async def steps(chat: ChatTab, server: HostileServer) -> list[Any]:
        await chat.tab.click("#open-settings")
        await chat.tab.value(
            f"for (const [id, text] of Object.entries({json.dumps(SETTINGS)}))"
            " document.getElementById(id).value = text;"
            " document.getElementById('settings-form').requestSubmit()"
        )
        server.answers += [[tool_call("lookup", '{"word": "fox"}')], [{"content": "An animal."}]]
        await chat.send("What is a fox?")
        await chat.tab.until("document.querySelector('.result-text') !== null")
        await chat.tab.value("document.querySelector('.result-text').focus()")
        await chat.tab.write("fox: an animal")
        await chat.tab.click(".send-results")
        await chat.tab.until("document.querySelectorAll('.message').length === 4")
        await chat.answered()
        return [*server.bodies, await chat.shown()]

    first, second, shown = at_page(steps)
    given: dict[str, Any] = {"temperature": 0.5, "max_tokens": 64, "enable_thinking": False}
    given["tools"] = [{"type": "function", "function": TOOL}]
    assert {name: first[name] for name in given} == given
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    (call,), result = second["messages"][-2]["tool_calls"], second["messages"][-1]
    assert call["function"] == {"name": "lookup", "arguments": '{"word": "fox"}'}
    told = {"role": "tool", "tool_call_id": call["id"], "content": "fox: an animal"}
    assert (result, shown[-1]) == (told, ("assistant", "An animal."))


def test_thinking_is_open_while_it_comes_and_only_a_whole_answer_is_told_to_screen_readers(
    at_page: AtPage,
) -> None:
    look = f"[document.querySelector('.thinking').open, {STATE}]"

    async def steps(chat: ChatTab, server: HostileServer) -> list[Any]:
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

    thinks, thought, says, said = at_page(steps)
    assert (thinks[0], thought[0], says[0], said[0]) == (True, False, False, False)
    assert "Half" not in says[1] and said[1] == "Answer: Half of it"


def test_of_a_long_answer_only_what_comes_is_drawn_anew(at_page: AtPage) -> None:
    paragraphs = "document.querySelectorAll('.body p').length"

    async def steps(chat: ChatTab, server: HostileServer) -> list[Any]:
        server.hold.clear()
        server.answers.append([{"content": PARAGRAPH.format(n)} for n in range(PARAGRAPHS)])
        await chat.tab.value(COUNT_REMOVED)
        await chat.send("All of it.")
        await chat.tab.until(f"{paragraphs} >= {PARAGRAPHS}")
        await chat.tab.value("document.querySelector('.body p').isFirst = true")
        removed = await chat.tab.value("window.removed")
        server.hold.set()
        await chat.answered()
        left = await chat.tab.value(f"[document.querySelector('.body p').isFirst, {paragraphs}]")
        return [removed, left]

    removed, left = at_page(steps)
    assert left == [True, PARAGRAPHS]
    assert removed < PARAGRAPHS, "blocks that are whole are not drawn again"
