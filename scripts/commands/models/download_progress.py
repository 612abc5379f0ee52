"""Shows how far a download is: a bar on a terminal, else a line every few seconds."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_EVERY_S: Final = 10.0


class DownloadProgress:
    """Counts bytes of several threads against their total, and shows them on `console`."""

    def __init__(
        self,
        console: Console,
        about: str,
        total: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._about = about
        self._total = total
        self._clock = clock
        self._lock = threading.Lock()
        self._here = 0
        self._begun_at = self._told_at = clock()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console) if console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task(about, total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif error is None:
            self._print_line()

    def advance(self, nbytes: int) -> None:
        """Count bytes that came; fewer than none where some were given up. Any thread."""
        with self._lock:
            self._here += nbytes
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, completed=self._here)
            elif self._clock() - self._told_at >= LINE_EVERY_S:
                self._told_at = self._clock()
                self._print_line()

    def say(self, text: str) -> None:
        """Show a line above the bar."""
        self._console.print(text, markup=False, highlight=False)

    def _print_line(self) -> None:
        share = self._here / self._total if self._total else 1.0
        seconds = max(1e-9, self._clock() - self._begun_at)
        self.say(
            f"{self._about}: {self._here / 1e6:,.1f} of {self._total / 1e6:,.1f} MB "
            f"({share:.0%}, {self._here / 1e6 / seconds:,.1f} MB/s)"
        )
