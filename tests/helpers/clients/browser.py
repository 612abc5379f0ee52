"""Drives a real headless Chromium over its DevTools protocol, one page at a time."""

import asyncio
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine; .ci/run installs it"
)
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-port=0"),
)
LISTENING = "DevTools listening on "
WAIT_S_MAX = 60.0
PAGE_IS_LEAVING = -32000  # "Inspected target navigated or closed"
MESSAGE_BYTES_MAX = 64 * 1024 * 1024  # what a long page tells of itself
KEYS = {
    **{"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "k": 75, "F2": 113},
    **{"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40},
}
CONTROL, SHIFT = 2, 8  # what is held while a key is pressed


@contextlib.contextmanager
def chromium() -> Iterator[str]:
    """Run Chromium and give the address that DevTools are reached at."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                told = next((line for line in process.stderr if LISTENING in line), None)
                assert told is not None, "Chromium ended before it listened"
                yield told.partition(LISTENING)[2].strip()
            finally:
                process.terminate()


class PageLeaving(Exception):
    """The page went away for another one while it was asked."""


class Page:
    """One tab. `errors` are what its console has of errors and warnings, exceptions included.

    `requests` are the URLs of all that it asked for, and `dialogs` what it put before its user.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: dict[str, str] = {}
        self._target = ""
        self.profile = ""  # what cookies and kept data are of
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []

    async def read(self) -> None:
        """Take what Chromium sends, until the connection ends."""
        async for frame in self._socket:
            message = json.loads(frame.data)
            if "id" in message:
                self._waiting.pop(message["id"]).set_result(message)
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.errors.append(json.dumps(told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(json.dumps(told["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(told["message"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters, **self._session}
        await self._socket.send_json(message)
        async with asyncio.timeout(WAIT_S_MAX):
            answer = await future
        if answer.get("error", {}).get("code") == PAGE_IS_LEAVING:
            raise PageLeaving(method, answer)
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    async def attach(self, profile: str = "") -> None:
        """Open the tab that all calls are about from now on; by default in a new profile."""
        if not profile:
            profile = (await self.call("Target.createBrowserContext"))["browserContextId"]
        self.profile = profile
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=profile)
        self._target = target["targetId"]
        attached = await self.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            await self.call(f"{domain}.enable")
        # A Tab past the last element hands the focus to Chromium itself, some time later; what a
        # script focuses meanwhile tells nobody. A page that always has the focus tells.
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    async def close(self) -> None:
        """Close the tab: one that stays open asks for its server for as long as Chromium runs."""
        self._session = {}
        await self.call("Target.closeTarget", targetId=self._target)

    async def look(self, width: int, height: int, scheme: str) -> None:
        """Have the window that size and the system that colour scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def value(self, script: str) -> Any:
        """Return what the expression gives, as JSON has it."""
        told = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until the expression is true, and return it."""
        deadline = time.monotonic() + WAIT_S_MAX
        while time.monotonic() < deadline:
            with contextlib.suppress(PageLeaving):  # the next one may have it
                if value := await self.value(script):
                    return value
            await asyncio.sleep(0.05)
        raise AssertionError(f"not so after {WAIT_S_MAX} s: {script}; the console: {self.errors}")

    async def press(self, key: str, text: str = "", held: int = 0) -> None:
        number = KEYS.get(key, 0)
        code = {"key": key, "code": key, "windowsVirtualKeyCode": number, "modifiers": held}
        kind = "keyDown" if text else "rawKeyDown"
        await self.call("Input.dispatchKeyEvent", type=kind, text=text, **code)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        """Click on the middle of an element, with the mouse: whatever lies there is clicked."""
        middle = (
            f"(() => {{ const at = document.querySelector({json.dumps(selector)});"
            " at.scrollIntoView({block: 'nearest', behavior: 'instant'});"
            " const box = at.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        x, y = await self.value(middle)
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    async def choose(self, selector: str, *files: Path) -> None:
        """Choose files in a file input, as its dialog does."""
        found = await self.call(
            "Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})"
        )
        names = [str(file) for file in files]
        await self.call("DOM.setFileInputFiles", files=names, objectId=found["result"]["objectId"])

    async def before_load(self, script: str) -> None:
        """Have every page and frame that is opened from now on run `script` first."""
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    async def names(self) -> list[tuple[str, str]]:
        """Return role and name of all that a screen reader is told of."""
        nodes = (await self.call("Accessibility.getFullAXTree"))["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]


@contextlib.asynccontextmanager
async def page(devtools: str, profile: str = "") -> AsyncIterator[Page]:
    """Give a new tab of the Chromium at `devtools`, in another tab's `profile` or in its own."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(devtools, max_msg_size=MESSAGE_BYTES_MAX) as socket,
    ):
        opened = Page(socket)
        reader = asyncio.create_task(opened.read())
        try:
            await opened.attach(profile)
            yield opened
            await opened.close()
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
