"""Keeps a Mac from falling asleep by itself while requests run, by macOS's `caffeinate`.

Only requests of clients count: what is prefilled in idle time may wait for the machine's wake. A
closed lid and the menu's Sleep still put it to sleep.
"""

import asyncio
import contextlib
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Iterator
from typing import Final

log = logging.getLogger(__name__)

COMMAND: Final = "caffeinate"
# Between two requests an agent runs its tools: a command has 120 s by default in most agents, and
# a Mac that nobody has touched meanwhile sleeps as soon as it may.
GRACE_S: Final = 180.0


class KeepAwake:
    """Holds one `caffeinate` from a request's start until GRACE_S after the last one's end.

    Owner: the event loop. Invariants: there is one process at most, each is waited for when it
    ends, and none outlives this process (`-w`), however that ends.
    """

    def __init__(self, platform: str = sys.platform) -> None:
        """Nothing is done but on macOS."""
        self._is_on = platform == "darwin"
        self._open = 0  # requests
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_held = False
        self.failures = 0  # it could not be started, or ended by itself

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Hold the machine awake within, and for a while after. Never waits."""
        self._open += 1
        self._changed.set()
        if self._is_on and self._task is None:
            self._task = asyncio.create_task(self._run(), name="keep awake")
        try:
            yield
        finally:
            self._open -= 1
            self._changed.set()
            assert self._open >= 0, self._open

    async def close(self) -> None:
        """Let the machine sleep: this server stops."""
        self._is_on = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while self._open and await self._hold():
                pass
        finally:
            self._task = None

    async def _hold(self) -> bool:
        """Run one `caffeinate` for as long as it is of use; say whether it did not fail."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(COMMAND, "-i", "-w", str(os.getpid())),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=DEVNULL,
                start_new_session=True,  # Ctrl-C is ours alone
            )
        except OSError as error:
            self._note_failure(f"cannot be started: {error.strerror}")
            return False
        self.is_held = True
        try:
            if await self._until_unused(process):
                return True
            self._note_failure(f"ended by itself with {process.returncode}")
            return False
        finally:
            self.is_held = False
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # it has nothing to clean up, and this cannot take long
            await process.wait()

    async def _until_unused(self, process: Process) -> bool:
        """Return True once no request was open for GRACE_S, False when `process` has ended."""
        ended = asyncio.create_task(process.wait())
        try:
            while not ended.done():
                self._changed.clear()
                changed = asyncio.create_task(self._changed.wait())
                wait_s = None if self._open else GRACE_S
                await asyncio.wait({ended, changed}, timeout=wait_s, return_when="FIRST_COMPLETED")
                is_unused = not changed.done()
                changed.cancel()
                if is_unused and not ended.done():
                    return True
            return False
        finally:
            ended.cancel()

    def _note_failure(self, what: str) -> None:
        self.failures += 1
        if self.failures == 1:  # each request would tell it again
            log.warning(
                "%s %s. This Mac may fall asleep amid a request: set `sudo pmset sleep 0`.",
                COMMAND,
                what,
            )
