"""The page to talk in a real browser, before a model whose words are written down beforehand.

One visit is watched, and looked at from all sides.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from tests.helpers.chat_page.chat_tab import ANSWER_KEPT, LOOKS, STATE, ChatTab
from tests.helpers.clients.axe import serious_findings
from tests.helpers.clients.browser import CONTROL, NEEDS_CHROMIUM, SHIFT, Page, page
from tests.helpers.clients.run_clients import CONTEXT_TOKENS, MODEL
from tests.helpers.servers.scripted_server import ScriptedServer

pytestmark = NEEDS_CHROMIUM
CHECKS: Final = (Path(__file__).parents[2] / "helpers" / "clients" / "page_checks.js").read_text()
FOCUS_MAX: Final = 60  # presses of Tab
NAMED: Final = {"button", "link", "textbox", "searchbox", "combobox", "img", "region", "dialog"}
FOCUSED: Final = """(() => {
  const at = document.activeElement;
  return at === document.body ? "" : at.id || at.className || at.textContent.trim().slice(0, 60);
})()"""
LAST_QUESTION: Final = ".message:nth-last-child(2)"
WRITTEN: Final = "(document.querySelector('[data-role=assistant] .body')?.textContent.length ?? 0)"

QUESTION: Final = "How do I count the words of a file in Python?"
MORE: Final = "And how many lines?"
EDITED: Final = "And how do I count its lines?"
LONG_ASK: Final = "Tell me a long story."
CODE: Final = """from collections import Counter
from pathlib import Path

def word_counts(path: str) -> Counter[str]:
    text = Path(path).read_text()
    return Counter(text.lower().split())"""
COUNTED: Final = f"""Read the file and let `Counter` do the rest:

```python
{CODE}
```

| call | gives |
|---|---|
| `word_counts("a.txt").total()` | all words |
| `word_counts("a.txt")["the"]` | one word |

Punctuation stays with its word. See the [documentation](https://docs.python.org/3/)."""
LINES: Final = "Iterate over it: `sum(1 for _ in open(path))` reads **one line at a time**."
ASK: Final = "What is 17 % of 2,480?"
RESULT: Final = "421.6"
LONG: Final = "\n\n".join(f"Part {number}. The fox jumps over the dog." for number in range(400))
READ: Final = "What does the file say?"
TELLS: Final = "It tells of a fox."
ANSWERS: Final[dict[str, Any]] = {
    QUESTION: [{"reasoning": "A counter of words is wanted.", "content": COUNTED}],
    MORE: [{"content": "That depends on the file."}],
    EDITED: [{"reasoning": "Lines, not words.", "content": LINES}],
    ASK: [
        {"calls": [["calculate", {"expression": "2480 * 17 / 100"}]]},
        {"content": f"17 % of 2,480 is **{RESULT}**."},
    ],
    LONG_ASK: [{"content": LONG}],
    READ: [{"content": TELLS}],
}
FILE: Final = ("fox.txt", "text/plain", "The fox jumps over the dog. " * 250)
Seen = dict[str, Any]  # what one visit showed, by what was looked at

NAMES: Final = "#conversations .open"
COUNT: Final = "document.querySelectorAll('%s').length"
BODY: Final = "document.querySelector('[data-role=assistant] .body').innerHTML"
PROMPT: Final = "document.getElementById('prompt').value"
CHECKED: Final = "({text: checks.text(), overflow: checks.overflow()})"
AT_ROW: Final = (
    "[...document.querySelectorAll('#conversations .open')].indexOf(document.activeElement)"
)
IN_DRAWER: Final = "document.querySelector('#sidebar').contains(document.activeElement)"
NO_DOWNLOAD: Final = """URL.createObjectURL = (blob) => {
  blob.text().then((text) => (window.saved = text));
  return "blob:" + location.origin + "/x";
}; HTMLAnchorElement.prototype.click = () => {}; 0"""


async def counted(tab: Page, selector: str, count: int) -> None:
    """Wait until the page has so many of these."""
    await tab.until(f"{COUNT % selector} === {count}")


async def look_around(chat: ChatTab, seen: Seen) -> None:
    """Look at an answer in each way, and have axe-core do so."""
    seen["looks"], seen["findings"] = {}, {}
    for name in LOOKS:
        await chat.look(name)
        seen["looks"][name] = await chat.tab.value(CHECKED)
        if name != "phone":
            seen["findings"][name] = await serious_findings(chat.tab)
    await chat.look("light")


async def talk(chat: ChatTab, server: ScriptedServer, seen: Seen) -> None:
    """Ask, and look at the answer while it comes."""
    await chat.open()
    await chat.tab.value(CHECKS)
    seen["model"] = await chat.tab.until("document.getElementById('about-model').textContent")
    await chat.send(QUESTION)
    await chat.answered()
    await chat.tab.until("document.querySelector('.hljs-keyword') !== null")
    seen["html"], seen["spoken"] = await chat.tab.value(f"[{BODY}, {STATE}]")
    (seen["line"],) = await chat.texts(".cache-line")
    await look_around(chat, seen)
    seen["names"] = await chat.tab.names()


async def edit(chat: ChatTab, server: ScriptedServer, seen: Seen) -> None:
    """Change what was asked: a branch; go back to the first one; have it answered again."""
    await chat.say(MORE)
    await chat.tab.click(f"{LAST_QUESTION} .edit")
    await chat.tab.until("document.activeElement.className === 'edit-text'")
    await chat.type_over(".edit-text", EDITED)
    await counted(chat.tab, ".branch-number", 1)
    await chat.answered()
    seen["branch line"] = (await chat.texts(".cache-line"))[-1]
    seen["second"] = [await chat.texts(".branch-number"), await chat.shown()]
    await chat.tab.click(f"{LAST_QUESTION} .branch-previous")
    seen["first"] = [await chat.texts(".branch-number"), await chat.shown()]
    await chat.tab.click(".message:last-child .regenerate")
    await counted(chat.tab, ".branch-number", 2)
    await chat.answered()
    seen["again"] = await chat.texts(".branch-number")


async def use_tools(chat: ChatTab, server: ScriptedServer, seen: Seen) -> None:
    """Switch the page's own tools on, and have the model call one."""
    await chat.new()
    await chat.tab.click("#open-settings")
    await chat.tab.click("#has-tools")
    seen["findings"]["settings"] = await serious_findings(chat.tab)
    await chat.tab.click("#settings-save")
    await chat.tab.until("document.querySelector('dialog[open]') === null")
    await chat.say(ASK)
    seen["tools"] = [await chat.texts(name) for name in (".tool-call", ".tool-result")]
    seen["tool answer"] = (await chat.shown())[-1]


async def stop(chat: ChatTab, server: ScriptedServer, seen: Seen) -> None:
    """Stop a long answer with Esc; what came stays."""
    await chat.new()
    await chat.send(LONG_ASK)
    await chat.tab.until(f"{WRITTEN} > 200")
    await chat.tab.press("Escape")
    await chat.answered()
    seen["stopped"] = [*await chat.texts(".stopped"), await chat.tab.value(STATE)]
    seen["at once"] = (await chat.shown())[-1][1]
    await asyncio.to_thread(server.wait_until_idle)
    seen["later"] = (await chat.shown())[-1][1]


async def read_a_file(chat: ChatTab, server: ScriptedServer, seen: Seen) -> None:
    """Attach a long text, and watch how far the prompt is read."""
    await chat.new()
    await chat.attach(FILE)
    await counted(chat.tab, "#attachments li", 1)
    server.pause(0.7)
    await chat.send(READ)
    await chat.tab.until("document.querySelector('.waiting progress') !== null")
    seen["prefill"] = await chat.texts(".waiting .note")
    server.pause(0)
    await chat.answered()
    seen["prefill"] += await chat.texts(".message[data-role=user] .file-name")


async def come_back(chat: ChatTab, server: ScriptedServer, seen: Seen) -> None:
    """Reload amid a talk with something typed: all is as it was."""
    await chat.write("Half a thought")
    seen["before"] = await chat.shown()
    await chat.tab.until(ANSWER_KEPT % json.dumps(TELLS))
    await chat.reload()
    await chat.tab.until("document.querySelectorAll('.message').length > 0")
    seen["after"], seen["draft"] = await chat.shown(), await chat.tab.value(PROMPT)
    await chat.tab.value("document.getElementById('prompt').select()")
    await chat.tab.call(
        "Input.dispatchKeyEvent", type="keyDown", key="Backspace", windowsVirtualKeyCode=8
    )


async def keep_house(chat: ChatTab, server: ScriptedServer, seen: Seen) -> None:
    """Search, rename, delete and undo."""
    tab = chat.tab
    seen["titles"] = await chat.texts(NAMES)
    await chat.type_over("#search", "counter")
    await counted(tab, NAMES, 1)
    seen["found"] = await chat.texts(NAMES)
    await chat.type_over("#search", "  ")
    await counted(tab, NAMES, len(seen["titles"]))
    await tab.value(f"document.querySelector('{NAMES}').focus()")
    await tab.press("F2")
    await tab.until("document.activeElement.className === 'rename-text'")
    await tab.write("The fox")
    await tab.press("Enter", "\r")
    await tab.until(f"document.querySelector('{NAMES}')?.textContent === 'The fox'")
    seen["renamed"] = await chat.texts(NAMES)
    await tab.value("document.querySelector('#conversations .delete').click()")
    await counted(tab, NAMES, len(seen["titles"]) - 1)
    seen["deleted"] = await chat.texts(NAMES)
    await tab.value("document.querySelector('#toast button').click()")
    await counted(tab, NAMES, len(seen["titles"]))
    seen["undone"] = await chat.texts(NAMES)


async def export_and_import(chat: ChatTab, server: ScriptedServer, seen: Seen) -> None:
    """Export, leave a draft, delete all, import."""
    tab = chat.tab
    await tab.value(NO_DOWNLOAD)
    await tab.value("document.getElementById('export').click()")
    text = await tab.until("window.saved")
    await tab.value("document.querySelector('#conversations li:last-child .open').click()")
    await counted(tab, ".message", 4)
    await chat.write("Another thought")
    await tab.value(f"document.querySelector('{NAMES}').click()")
    await counted(tab, ".message", 2)
    await tab.value("document.getElementById('delete-all').click()")
    await tab.until("document.getElementById('delete-all').textContent.includes('for good')")
    await tab.value("document.getElementById('delete-all').click()")
    await counted(tab, NAMES, 0)
    seen["left"] = await tab.value("JSON.stringify(localStorage)")
    await chat.import_text(text)
    await counted(tab, NAMES, len(seen["undone"]))
    seen["imported"] = await chat.texts(NAMES)


async def go_by_keyboard(chat: ChatTab, server: ScriptedServer, seen: Seen) -> None:
    """Use no mouse: the list, the skip link, all stops of Tab, a new line, a new chat."""
    tab, seen["focus"] = chat.tab, []
    await tab.value(f"document.querySelector('{NAMES}').focus()")
    await tab.press("ArrowDown")
    seen["down"] = await tab.value(AT_ROW)
    await tab.press("Enter", "\r")
    await tab.until("document.querySelectorAll('.message').length > 0")
    shown = await chat.shown()
    await chat.press(".skip")
    await tab.until("document.activeElement.id === 'prompt'")
    assert await chat.shown() == shown, "the skip link leaves the conversation open"
    await tab.value("document.activeElement.blur()")
    for _ in range(FOCUS_MAX):
        await tab.press("Tab")
        seen["focus"].append(await tab.value(FOCUSED))
        if seen["focus"][-1] == seen["focus"][0] != "" and len(seen["focus"]) > 1:
            break
    await chat.write("One")
    await tab.press("Enter", "\r", held=SHIFT)
    await tab.write("Two")
    seen["lines"] = await tab.value(PROMPT)
    await tab.press("k", held=CONTROL)
    await counted(tab, ".message", 0)
    seen["new"] = await tab.value(FOCUSED)


async def hold_the_phone(chat: ChatTab, server: ScriptedServer, seen: Seen) -> None:
    """Open the drawer of a phone."""
    await chat.look("phone")
    await chat.tab.click("#open-sidebar")
    await chat.tab.until("document.body.classList.contains('drawer')")
    await chat.rest()
    seen["findings"]["drawer"] = await serious_findings(chat.tab)
    seen["drawer"] = [await chat.tab.value(IN_DRAWER)]
    await chat.tab.press("Escape")
    seen["drawer"].append(await chat.tab.value("document.body.classList.contains('drawer')"))
    seen["drawer"].append(await chat.tab.value(FOCUSED))


STEPS: Final = (
    *(talk, edit, use_tools, stop, read_a_file, come_back),
    *(keep_house, export_and_import, go_by_keyboard, hold_the_phone),
)


async def watched(server: ScriptedServer, devtools: str) -> Seen:
    seen: Seen = {}
    server.answer(ANSWERS)
    server.forget()
    async with page(devtools) as tab:
        for step in STEPS:
            await step(ChatTab(tab, server.url), server, seen)
        seen["errors"] = list(tab.errors)
        seen["requests"] = {url for url in tab.requests if not url.startswith(server.url)}
    return seen


@pytest.fixture(scope="module")
def seen(scripted: ScriptedServer, devtools: str) -> Seen:
    return asyncio.run(watched(scripted, devtools))


def test_an_answer_is_markdown_with_code_and_its_line_says_what_the_cache_did(seen: Seen) -> None:
    assert seen["model"] == f"{MODEL}: {CONTEXT_TOKENS:,} tokens of context."
    assert seen["spoken"].startswith("Answer: Read the file")
    for part in ('<span class="language">python</span>', "copy-code", "<table>"):
        assert part in seen["html"]
    assert 'rel="noopener noreferrer"' in seen["html"] and "(docs.python.org)" in seen["html"]
    assert re.fullmatch(r"read [\d,]+ of [\d,]+ tokens, .+ · first token .+", seen["line"])


def test_an_edit_is_a_branch_that_reads_only_what_changed(seen: Seen) -> None:
    (numbers, second), (numbers_before, first) = seen["second"], seen["first"]
    assert (numbers, numbers_before, seen["again"]) == (["2/2"], ["1/2"], ["1/2", "2/2"])
    assert (second[-2], first[-2]) == (("user", EDITED), ("user", MORE))
    assert "one line at a time" in second[-1][1] and "depends" in first[-1][1]
    assert second[:-2] == first[:-2]
    found = re.match(r"read ([\d,]+) of ([\d,]+) tokens, ([\d,]+) kept", seen["branch line"])
    assert found is not None, seen["branch line"]
    read, whole, kept = (int(figure.replace(",", "")) for figure in found.groups())
    assert read + kept == whole and kept > 100 > read


def test_the_pages_own_tools_run_when_the_model_calls_them(seen: Seen) -> None:
    (call,), (result,) = seen["tools"]
    assert "calculate" in call and "2480 * 17 / 100" in call and RESULT in result
    assert seen["tool answer"] == ("assistant", f"17 % of 2,480 is {RESULT}.")


def test_esc_stops_an_answer_and_what_came_stays(seen: Seen) -> None:
    assert seen["stopped"] == ["Stopped.", "Stopped."], "shown, and told to screen readers"
    assert 200 < len(seen["at once"]) < len(LONG)
    assert seen["later"] == seen["at once"]


def test_a_long_prompt_tells_how_far_it_is_read(seen: Seen) -> None:
    told, name = seen["prefill"]
    assert re.fullmatch(r"reads [\d,]+ of [\d,]+ tokens", told) and name == FILE[0]


def test_a_reload_keeps_the_talk_and_what_was_typed(seen: Seen) -> None:
    assert seen["after"] == seen["before"] and len(seen["after"]) == 2
    assert seen["draft"] == "Half a thought"


def test_conversations_are_named_searched_renamed_deleted_and_brought_back(seen: Seen) -> None:
    titles = [READ, LONG_ASK, ASK, QUESTION]
    assert (seen["titles"], seen["found"]) == (titles, [QUESTION]), "by a word of its answer"
    assert seen["renamed"] == ["The fox", *titles[1:]]
    assert seen["deleted"] == titles[1:]
    assert sorted(seen["undone"]) == sorted(seen["renamed"]) == sorted(seen["imported"])
    assert "draft" not in seen["left"] and "thought" not in seen["left"]


def test_all_goes_without_a_mouse(seen: Seen) -> None:
    assert (seen["down"], seen["lines"], seen["new"]) == (1, "One\nTwo", "prompt")
    assert {"new-chat", "search", "model", "open-settings", "prompt", "send"} < set(seen["focus"])
    assert any("edit" in each for each in seen["focus"])
    assert seen["drawer"] == [True, False, "open-sidebar"], "an open drawer has the focus"


def test_all_has_a_name_stands_out_and_fits_the_window(seen: Seen) -> None:
    roles = {role for role, _ in seen["names"]}
    assert {"main", "navigation", "article", "status", "button", "combobox"} <= roles
    assert [role for role, name in seen["names"] if role in NAMED and not name.strip()] == []
    for told in seen["looks"].values():
        assert told["text"]["count"] > 20
        assert (told["text"]["short"], told["overflow"]) == ([], 0)
    if None in seen["findings"].values():
        pytest.skip("axe-core is not installed, and npm does not reach its registry")
    assert set(seen["findings"]) == {"light", "dark", "settings", "drawer"}
    assert not any(seen["findings"].values()), seen["findings"]


def test_the_console_stays_clean_and_nothing_but_the_server_is_asked(seen: Seen) -> None:
    assert seen["errors"] == []
    assert {url for url in seen["requests"] if not url.startswith(("data:", "blob:"))} == set()
