"""Shows on the server's own terminal how far loads and long prefills are: one line, drawn again.

The line is of the terminal alone: nothing of it is in a log. Log lines of the proxy and its workers
clear it first (shared/logging_setup.py), and it is drawn again below them. It names programs, never
what a prompt says.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TextIO

from hearth.shared.logging_setup import CLEAR_LINE, is_terminal

DRAW_EVERY_S: Final = 0.5
LONG_S: Final = 2.0  # a prefill is shown once it has taken so long
BAR_CELLS: Final = 12  # a line fits 80 columns
_MB: Final = 2**20
_GB: Final = 2**30

Rows = Sequence[dict[str, Any]]


class TerminalProgress:
    """Draws the line while there is something to tell. Owner: the event loop.

    Invariant: nothing is written where the stream is no terminal that can clear a line.
    """

    def __init__(
        self,
        stream: TextIO,
        workers: Callable[[], Rows],
        prefills: Callable[[], Rows],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`workers` gives the rows of /health, `prefills` those of the pool."""
        self._stream = stream
        self._workers = workers
        self._prefills = prefills
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}  # when a prefill was first seen, and how far
        self._is_drawn = False

    async def run(self) -> None:
        """Draw until cancelled."""
        while is_terminal(self._stream, os.environ):
            self.draw()
            await asyncio.sleep(DRAW_EVERY_S)

    def draw(self) -> None:
        """Draw what is to be told now; clear the line where there is nothing."""
        text = self.text()
        if text:
            width = shutil.get_terminal_size().columns
            self._stream.write(f"{CLEAR_LINE}{text[: width - 1]}")
            self._stream.flush()
            self._is_drawn = True
        else:
            self.clear()

    def clear(self) -> None:
        """Take the line away: other text follows."""
        if self._is_drawn:
            self._stream.write(CLEAR_LINE)
            self._stream.flush()
        self._is_drawn = False

    def text(self) -> str:
        """Return the line: the load or prefill that has furthest to go, and how many there are."""
        loads = [row for row in self._workers() if row.get("loading")]
        prefills = list(self._prefills())
        now = self._clock()
        known = {row["request_id"]: (now, row["done_tokens"]) for row in prefills}
        self._seen = known | {name: at for name, at in self._seen.items() if name in known}
        slow = [row for row in prefills if row["age_s"] >= LONG_S]
        slow.sort(key=lambda row: row["prompt_tokens"] - row["done_tokens"], reverse=True)
        told = [_load_text(row) for row in loads]
        told += [self._prefill_text(row, now) for row in slow]
        more = f"  (and {len(told) - 1} more)" if len(told) > 1 else ""
        return f"{told[0]}{more}" if told else ""

    def _prefill_text(self, row: dict[str, Any], now: float) -> str:
        done, whole = row["done_tokens"], row["prompt_tokens"]
        since, first = self._seen[row["request_id"]]
        name = row["client"] or "a client"
        text = f"{name}: prompt {_bar(done, whole)} of {whole:,}"
        if now <= since or done <= first:
            return text
        speed = (done - first) / (now - since)
        return f"{text}, {speed:,.0f} tok/s, {_time((whole - done) / speed)} left"


def _load_text(row: dict[str, Any]) -> str:
    loading = row["loading"]
    held, whole = loading["held_bytes"], loading["of_bytes"]
    unit, name = (_GB, "GB") if whole >= _GB else (_MB, "MB")
    size = f" {_bar(held, whole)} {held / unit:.1f} of {whole / unit:.1f} {name}" if whole else ""
    return f"worker {row['id']} loads: {loading['step']}{size}, {_time(loading['s'])}"


def _bar(done: int, whole: int) -> str:
    """Return a bar and a percentage; no more than the whole, whatever is told."""
    share = min(1.0, max(0.0, done / whole)) if whole > 0 else 0.0
    full = int(share * BAR_CELLS)
    return f"[{'#' * full}{'.' * (BAR_CELLS - full)}] {int(share * 100)} %"


def _time(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 100 else f"{whole // 60} min"
