"""Uses the page to talk as a person does, in a tab of a real browser."""

import json
from typing import Any, Final

from tests.helpers.clients.browser import Page

LOOKS: Final = {
    "light": (1180, 820, "light"),
    "dark": (1180, 820, "dark"),
    "phone": (360, 740, "light"),
}
SHOWN: Final = """[...document.querySelectorAll('.message')].map((each) =>
  [each.dataset.role, each.querySelector('.body, pre')?.innerText.trim() ?? ''])"""
TEXTS: Final = "[...document.querySelectorAll('%s')].map((each) => each.textContent)"
IS_IDLE: Final = (
    "!document.getElementById('send').hidden && !document.querySelector('[aria-busy=true]')"
)
STATE: Final = "document.getElementById('status').textContent"
# Tells whether an answer of these words is in the browser's store, which outlives the page.
ANSWER_KEPT: Final = """import('/chat/store.js').then((store) => store.all()).then((all) =>
  all.some((each) => Object.values(each.nodes).some((node) => node.content === %s)))"""


class ChatTab:
    """The page to talk at `url`, in `tab`."""

    def __init__(self, tab: Page, url: str) -> None:
        self.tab = tab
        self.url = url

    async def open(self, look: str = "light") -> None:
        await self.look(look)
        await self.tab.open(self.url)
        await self.tab.until("document.querySelectorAll('#model option').length > 0")

    async def look(self, name: str) -> None:
        width, height, scheme = LOOKS[name]
        await self.tab.look(width, height, scheme)
        has_scheme = f"matchMedia('(prefers-color-scheme: {scheme})').matches"
        await self.tab.until(f"innerWidth === {width} && {has_scheme}")
        await self.rest()

    async def rest(self) -> None:
        """Wait until nothing moves: what slides away still takes clicks."""
        await self.tab.until("document.getAnimations().every((each) => each.playState !== 'running'"
                             " || each.effect.getTiming().iterations === Infinity)")  # fmt: skip

    async def write(self, text: str) -> None:
        await self.tab.value("document.getElementById('prompt').focus()")
        await self.tab.write(text)

    async def send(self, text: str) -> None:
        """Write and press Enter; the answer comes in its own time."""
        await self.write(text)
        await self.tab.press("Enter", "\r")

    async def type_over(self, selector: str, text: str) -> None:
        """Write over what a field has, and press Enter."""
        await self.tab.value(f"document.querySelector({json.dumps(selector)}).select()")
        await self.tab.write(text)
        await self.tab.press("Enter", "\r")

    async def say(self, text: str) -> str:
        """Send, and return the answer once all of it is there."""
        await self.send(text)
        await self.answered()
        return str((await self.shown())[-1][1])

    async def answered(self) -> None:
        await self.tab.until(IS_IDLE)

    async def shown(self) -> list[tuple[str, str]]:
        """Return role and text of each message."""
        return [(role, text) for role, text in await self.tab.value(SHOWN)]

    async def texts(self, selector: str) -> list[str]:
        return list(await self.tab.value(TEXTS % selector))

    async def new(self) -> None:
        await self.tab.click("#new-chat")
        await self.tab.until("document.querySelectorAll('.message').length === 0")

    async def reload(self) -> None:
        await self.tab.call("Page.reload")
        await self.tab.until("document.querySelectorAll('#model option').length > 0")

    async def import_text(self, text: str) -> None:
        """Import a file with this text, as its dialog does."""
        await self._give("#import-file", [("talk.json", "application/json", text)])

    async def press(self, selector: str) -> None:
        """Press Enter on a button, without a mouse."""
        await self.tab.value(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.tab.press("Enter", "\r")

    async def attach(self, *files: tuple[str, str, str]) -> None:
        """Attach files, each a name, a type and a text."""
        await self._give("#file", list(files))

    async def _give(self, selector: str, files: list[Any]) -> None:
        await self.tab.value(
            f"""((rows, input) => {{
              const given = new DataTransfer();
              for (const [name, type, text] of rows)
                given.items.add(new File([text], name, {{type}}));
              input.files = given.files;
              input.dispatchEvent(new Event("change", {{bubbles: true}}));
            }})({json.dumps(files)}, document.querySelector({json.dumps(selector)}))"""
        )
