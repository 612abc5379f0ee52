"""The page to talk in a real browser, before a model whose words are written down beforehand.

One visit is watched, and looked at from all sides; pictures are taken where HEARTH_ARTEFACTS says.
"""

import asyncio
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.helpers.chat_page.chat_tab import ANSWER_KEPT, LOOKS, STATE, ChatTab
from tests.helpers.clients.axe import serious_findings
from tests.helpers.clients.browser import CONTROL, NEEDS_CHROMIUM, SHIFT, page
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
ANSWERS: Final = {
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


@dataclass
class Seen:
    """What one visit showed."""

    about_model: str = ""
    html: str = ""
    first_line: str = ""
    spoken: str = ""
    branches: list[Any] = field(default_factory=list)  # what is shown at 2/2, then at 1/2
    branch_line: str = ""
    again: list[str] = field(default_factory=list)
    tools: dict[str, Any] = field(default_factory=dict)
    stopped: dict[str, Any] = field(default_factory=dict)
    prefill: list[str] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)  # what is shown before a reload, and after it
    draft: str = ""
    titles: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    deleted: list[list[str]] = field(default_factory=list)  # after a deletion, and its undoing
    exported: dict[str, Any] = field(default_factory=dict)
    imported: list[Any] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    looks: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: dict[str, list[str] | None] = field(default_factory=dict)
    names: list[tuple[str, str]] = field(default_factory=list)
    focus: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    requests: set[str] = field(default_factory=set)


class Visit:
    """One visit of the page at a server. Owner: the test's event loop."""

    def __init__(self, chat: ChatTab, server: ScriptedServer, artefacts: Path | None) -> None:
        self.chat, self.tab, self.server = chat, chat.tab, server
        self.artefacts = artefacts
        self.seen = Seen()

    async def shoot(self, name: str) -> None:
        await self.chat.shoot(self.artefacts, name)

    async def look_around(self, state: str, looks: tuple[str, ...] = tuple(LOOKS)) -> None:
        """Look at what is shown in each way, and have axe-core do so."""
        for name in looks:
            await self.chat.look(name)
            await self.shoot(f"{state}-{name}")
            checked = await self.tab.value("({text: checks.text(), overflow: checks.overflow()})")
            self.seen.looks[f"{state} {name}"] = checked
            if state == "answer" and name != "phone":
                self.seen.findings[f"{state} {name}"] = await serious_findings(self.tab)
        await self.chat.look("light")

    async def talk(self) -> None:
        """Ask, and look at the answer while it comes."""
        seen, tab = self.seen, self.tab
        await self.chat.open()
        await tab.value(CHECKS)
        about = "document.getElementById('about-model').textContent"
        await tab.until(f"{about} !== ''")
        seen.about_model = await tab.value(about)
        await self.chat.send(QUESTION)
        await self.chat.answered()
        await tab.until("document.querySelector('.hljs-keyword') !== null")
        seen.html = await tab.value(
            "document.querySelector('[data-role=assistant] .body').innerHTML"
        )
        (seen.first_line,) = await self.chat.texts(".cache-line")
        seen.spoken = await tab.value(STATE)
        await self.look_around("answer")
        seen.names = await tab.names()

    async def edit(self) -> None:
        """Change what was asked: a branch; go back to the first one; have it answered again."""
        seen, tab = self.seen, self.tab
        await self.chat.say(MORE)
        await tab.click(f"{LAST_QUESTION} .edit")
        await tab.until("document.activeElement.className === 'edit-text'")
        await tab.value("document.activeElement.select()")
        await tab.write(EDITED)
        await tab.press("Enter", "\r")
        await tab.until("document.querySelectorAll('.branch-number').length === 1")
        await self.chat.answered()
        seen.branch_line = (await self.chat.texts(".cache-line"))[-1]
        seen.branches.append([await self.chat.texts(".branch-number"), await self.chat.shown()])
        await self.shoot("branch")
        await tab.click(f"{LAST_QUESTION} .branch-previous")
        seen.branches.append([await self.chat.texts(".branch-number"), await self.chat.shown()])
        await tab.click(".message:last-child .regenerate")
        await tab.until("document.querySelectorAll('.branch-number').length === 2")
        await self.chat.answered()
        seen.again = await self.chat.texts(".branch-number")

    async def use_tools(self) -> None:
        """Switch the page's own tools on, and have the model call one."""
        seen, tab = self.seen, self.tab
        await self.chat.new()
        await tab.click("#open-settings")
        await tab.click("#has-tools")
        seen.findings["settings"] = await serious_findings(tab)
        await self.shoot("settings")
        await tab.click("#settings-save")
        await tab.until("document.querySelector('dialog[open]') === null")
        await self.chat.say(ASK)
        seen.tools = {
            "shown": await self.chat.shown(),
            "call": await self.chat.texts(".tool-call"),
            "result": await self.chat.texts(".tool-result"),
            "asked": self.server.asked()[-1].tools,
        }
        await self.look_around("tool", ("light",))

    async def stop(self) -> None:
        """Stop a long answer with Esc; what came stays."""
        seen, tab = self.seen, self.tab
        await self.chat.new()
        await self.chat.send(LONG_ASK)
        await tab.until(f"{WRITTEN} > 200")
        await tab.press("Escape")
        await self.chat.answered()
        at_once = (await self.chat.shown())[-1][1]
        seen.stopped = {
            "note": await self.chat.texts(".stopped"),
            "spoken": await tab.value(STATE),
            "text": at_once,
        }
        await asyncio.to_thread(self.server.wait_until_idle)
        seen.stopped["later"] = (await self.chat.shown())[-1][1]

    async def read_a_file(self) -> None:
        """Attach a long text, and watch how far the prompt is read."""
        seen, tab = self.seen, self.tab
        await self.chat.new()
        await self.chat.attach(FILE)
        await tab.until("document.querySelectorAll('#attachments li').length === 1")
        self.server.pause(0.7)
        await self.chat.send(READ)
        await tab.until("document.querySelector('.waiting progress') !== null")
        seen.prefill = await self.chat.texts(".waiting .note")
        await self.shoot("prefill")
        self.server.pause(0)
        await self.chat.answered()
        seen.prefill += await self.chat.texts(".message[data-role=user] .file-name")

    async def come_back(self) -> None:
        """Reload amid a talk with something typed: all is as it was."""
        seen = self.seen
        await self.chat.write("Half a thought")
        seen.kept.append(await self.chat.shown())
        await self.tab.until(ANSWER_KEPT % json.dumps(TELLS))
        await self.chat.reload()
        await self.tab.value(CHECKS)
        await self.tab.until("document.querySelectorAll('.message').length > 0")
        seen.kept.append(await self.chat.shown())
        seen.draft = await self.tab.value("document.getElementById('prompt').value")
        await self.tab.value("document.getElementById('prompt').select()")
        await self.tab.call("Input.dispatchKeyEvent", type="keyDown", key="Backspace",
                            windowsVirtualKeyCode=8)  # fmt: skip

    async def keep_house(self) -> None:
        """Search, rename, delete and undo, export, delete all, import."""
        seen, tab, chat = self.seen, self.tab, self.chat
        names = "#conversations .open"
        seen.titles = await chat.texts(names)
        await tab.value("document.getElementById('search').focus()")
        await tab.write("counter")
        await tab.until(f"document.querySelectorAll('{names}').length === 1")
        seen.found = await chat.texts(names)
        await tab.value("document.getElementById('search').select()")
        await tab.write("  ")
        await tab.until(f"document.querySelectorAll('{names}').length === {len(seen.titles)}")
        await tab.value(f"document.querySelector('{names}').focus()")
        await tab.press("F2")
        await tab.until("document.activeElement.className === 'rename-text'")
        await tab.write("The fox")
        await tab.press("Enter", "\r")
        await tab.until(f"document.querySelector('{names}')?.textContent === 'The fox'")
        seen.renamed = await chat.texts(names)
        await tab.value("document.querySelector('#conversations .delete').click()")
        await tab.until(f"document.querySelectorAll('{names}').length < {len(seen.titles)}")
        seen.deleted.append(await chat.texts(names))
        await tab.value("document.querySelector('#toast button').click()")
        await tab.until(f"document.querySelectorAll('{names}').length === {len(seen.titles)}")
        seen.deleted.append(await chat.texts(names))
        await self.export_and_import()

    async def export_and_import(self) -> None:
        seen, tab, chat = self.seen, self.tab, self.chat
        await tab.value(
            "URL.createObjectURL = (blob) => (blob.text().then((text) => (window.saved = text)),"
            " 'blob:' + location.origin + '/x'); HTMLAnchorElement.prototype.click = () => {}; 0"
        )
        await tab.value("document.getElementById('export').click()")
        text = await tab.until("window.saved")
        seen.exported = json.loads(text)
        before = await chat.texts("#conversations .open")
        await tab.value("document.querySelector('#conversations li:last-child .open').click()")
        await tab.until("document.querySelectorAll('.message').length === 4")
        await chat.write("Another thought")
        await tab.value("document.querySelector('#conversations .open').click()")
        await tab.until("document.querySelectorAll('.message').length === 2")
        await tab.value("document.getElementById('delete-all').click()")
        await tab.until("document.getElementById('delete-all').textContent.includes('for good')")
        await tab.value("document.getElementById('delete-all').click()")
        await tab.until("document.querySelectorAll('#conversations li').length === 0")
        left = await tab.value("JSON.stringify(localStorage)")
        await chat.import_text(text)
        await tab.until(f"document.querySelectorAll('#conversations li').length === {len(before)}")
        seen.imported = [left, sorted(before), sorted(await chat.texts("#conversations .open"))]

    async def go_by_keyboard(self) -> None:
        """Use no mouse: the skip link, all stops of Tab, a new line, a new chat."""
        seen, tab, chat = self.seen, self.tab, self.chat
        await tab.value("document.querySelector('#conversations .open').focus()")
        await tab.press("ArrowDown")
        seen.keys["down"] = await tab.value(
            "[...document.querySelectorAll('#conversations .open')].indexOf(document.activeElement)"
        )
        await tab.press("Enter", "\r")
        await tab.until("document.querySelectorAll('.message').length > 0")
        shown = await chat.shown()
        await tab.value("document.querySelector('.skip').focus()")
        await tab.press("Enter", "\r")
        await tab.value("new Promise((done) => setTimeout(done, 100))")
        seen.keys["skipped to"] = await tab.value(FOCUSED)
        seen.keys["still there"] = await chat.shown() == shown
        await tab.value("document.activeElement.blur()")
        for _ in range(FOCUS_MAX):
            await tab.press("Tab")
            at = await tab.value(FOCUSED)
            if at and at in seen.focus[:1]:
                break
            seen.focus += [at] if at else []
        await chat.write("One")
        await tab.press("Enter", "\r", held=SHIFT)
        await tab.write("Two")
        seen.keys["lines"] = await tab.value("document.getElementById('prompt').value")
        await tab.press("k", held=CONTROL)
        await tab.until("document.querySelectorAll('.message').length === 0")
        seen.keys["new"] = await tab.value(FOCUSED)

    async def hold_the_phone(self) -> None:
        """Open the drawer of a phone."""
        tab = self.tab
        await self.chat.look("phone")
        await tab.click("#open-sidebar")
        await tab.until("document.body.classList.contains('drawer')")
        await self.chat.rest()
        self.seen.findings["phone"] = await serious_findings(tab)
        await self.shoot("drawer")
        self.seen.keys["drawer"] = await tab.value("document.querySelector('#sidebar')"
                                                   ".contains(document.activeElement)")  # fmt: skip
        await tab.press("Escape")
        self.seen.keys["drawer closed"] = [
            await tab.value("document.body.classList.contains('drawer')"),
            await tab.value(FOCUSED),
        ]


async def watched(server: ScriptedServer, devtools: str, artefacts: Path | None) -> Seen:
    server.answer(ANSWERS)
    server.forget()
    async with page(devtools) as tab:
        visit = Visit(ChatTab(tab, server.url), server, artefacts)
        for step in (
            *(visit.talk, visit.edit, visit.use_tools, visit.stop, visit.read_a_file),
            *(visit.come_back, visit.keep_house, visit.go_by_keyboard, visit.hold_the_phone),
        ):
            await step()
        visit.seen.errors = list(tab.errors)
        visit.seen.requests = {url for url in tab.requests if not url.startswith(server.url)}
    return visit.seen


@pytest.fixture(scope="module")
def seen(scripted: ScriptedServer, devtools: str, artefacts: Path | None) -> Seen:
    return asyncio.run(watched(scripted, devtools, artefacts))


def test_an_answer_is_markdown_with_code_that_can_be_copied_and_is_told_to_screen_readers(
    seen: Seen,
) -> None:
    assert seen.spoken.startswith("Answer: Read the file")
    assert '<span class="language">python</span>' in seen.html
    assert "copy-code" in seen.html and "<table>" in seen.html
    assert 'rel="noopener noreferrer"' in seen.html and "(docs.python.org)" in seen.html


def test_the_model_and_its_context_are_told_before_the_first_question(seen: Seen) -> None:
    assert re.fullmatch(rf"{MODEL}: {CONTEXT_TOKENS:,} tokens of context\.", seen.about_model)


def test_the_line_below_an_answer_says_what_the_cache_did(seen: Seen) -> None:
    assert re.fullmatch(r"read [\d,]+ of [\d,]+ tokens, .+ · first token .+", seen.first_line)


def test_an_edit_is_a_branch_that_reads_only_what_changed(seen: Seen) -> None:
    (numbers, second), (numbers_before, first) = seen.branches
    assert (numbers, numbers_before) == (["2/2"], ["1/2"])
    assert (second[-2], first[-2]) == (("user", EDITED), ("user", MORE))
    assert "one line at a time" in second[-1][1] and "depends" in first[-1][1]
    assert second[:-2] == first[:-2]
    found = re.match(r"read ([\d,]+) of ([\d,]+) tokens, ([\d,]+) kept", seen.branch_line)
    assert found is not None, seen.branch_line
    read, whole, kept = (int(figure.replace(",", "")) for figure in found.groups())
    assert read + kept == whole and kept > 100 > read
    assert seen.again == ["1/2", "2/2"]


def test_the_pages_own_tools_run_when_the_model_calls_them(seen: Seen) -> None:
    assert seen.tools["asked"] == 2
    assert "calculate" in seen.tools["call"][0] and "2480 * 17 / 100" in seen.tools["call"][0]
    assert RESULT in seen.tools["result"][0]
    assert seen.tools["shown"][-1] == ("assistant", f"17 % of 2,480 is {RESULT}.")


def test_esc_stops_an_answer_and_what_came_stays(seen: Seen) -> None:
    assert seen.stopped["note"] == ["Stopped."] and seen.stopped["spoken"] == "Stopped."
    assert 200 < len(seen.stopped["text"]) < len(LONG)
    assert seen.stopped["later"] == seen.stopped["text"]


def test_a_long_prompt_tells_how_far_it_is_read(seen: Seen) -> None:
    told, name = seen.prefill
    assert re.fullmatch(r"reads [\d,]+ of [\d,]+ tokens", told)
    assert name == FILE[0]


def test_a_reload_keeps_the_talk_and_what_was_typed(seen: Seen) -> None:
    before, after = seen.kept
    assert after == before and len(after) == 2
    assert seen.draft == "Half a thought"


def test_conversations_are_named_searched_renamed_deleted_and_brought_back(seen: Seen) -> None:
    assert seen.titles == [READ, LONG_ASK, ASK, QUESTION]
    assert seen.found == [QUESTION], "by a word of its answer"
    assert seen.renamed == ["The fox", *seen.titles[1:]]
    assert seen.deleted[0] == seen.titles[1:]
    assert sorted(seen.deleted[1]) == sorted(seen.renamed)


def test_an_export_comes_back_by_import_and_delete_all_leaves_no_words(seen: Seen) -> None:
    assert len(seen.exported["conversations"]) == 4
    left, before, after = seen.imported
    assert "draft" not in left and "thought" not in left
    assert after == before


def test_all_goes_without_a_mouse(seen: Seen) -> None:
    assert seen.keys["down"] == 1
    assert seen.keys["skipped to"] == "prompt"
    assert seen.keys["still there"], "the skip link leaves the conversation open"
    assert seen.keys["lines"] == "One\nTwo"
    assert seen.keys["new"] == "prompt"
    assert {"new-chat", "search", "model", "open-settings", "prompt", "send"} <= set(seen.focus)
    assert any("edit" in each for each in seen.focus)
    assert seen.keys["drawer"], "an open drawer has the focus"
    assert seen.keys["drawer closed"] == [False, "open-sidebar"]


def test_a_screen_reader_is_told_a_name_for_all_that_has_a_part(seen: Seen) -> None:
    roles = {role for role, _ in seen.names}
    assert {"main", "navigation", "article", "status", "button", "combobox"} <= roles
    nameless = [role for role, name in seen.names if role in NAMED and not name.strip()]
    assert nameless == []


def test_text_stands_out_and_nothing_leaves_the_window(seen: Seen) -> None:
    assert {f"answer {look}" for look in LOOKS} < set(seen.looks)
    for look, told in seen.looks.items():
        assert told["text"]["count"] > 20, look
        assert told["text"]["short"] == [], look
        assert told["overflow"] == 0, look


def test_axe_core_finds_nothing_serious(seen: Seen) -> None:
    if None in seen.findings.values():
        pytest.skip("axe-core is not installed, and npm does not reach its registry")
    assert {place: found for place, found in seen.findings.items() if found} == {}
    assert {"answer light", "answer dark", "settings", "phone"} == set(seen.findings)


def test_the_console_stays_clean_and_nothing_but_the_server_is_asked(seen: Seen) -> None:
    assert seen.errors == []
    assert {url for url in seen.requests if not url.startswith(("data:", "blob:"))} == set()
