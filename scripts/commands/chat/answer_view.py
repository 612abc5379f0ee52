"""Shows one answer while it comes: the wait, the prefill, thinking in a line, then markdown."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hearth.commands.chat.answer_markdown import (
    LIVE_CHARS_MAX,
    AnswerMarkdown,
    Tail,
    finished_chars,
)
from hearth.commands.chat.answer_stream import Turn
from hearth.commands.terminal_text import shown, shown_name

DRAWN_EVERY_S: Final = 0.1
THOUGHT_CHARS_MAX: Final = 400  # of thinking, of which the end is shown
SPARE_LINES: Final = 2  # of the terminal, below what is drawn anew
_DIM: Final = "dim"


class AnswerView:
    """Draws one turn on a terminal. Owner: the event loop that reads the turn.

    Invariant: the first `_printed` characters of `_text` stand above what is drawn anew.
    """

    def __init__(self, console: Console, turn: Turn) -> None:
        self._console = console
        self._turn = turn
        self._printed = 0
        self._thought_until: float | None = None
        self._spinner = Spinner("dots", style=_DIM)

    @contextlib.asynccontextmanager
    async def drawn(self) -> AsyncIterator[None]:
        """Draw the turn until the block ends, then leave all of it above the cursor."""
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            drawing = asyncio.create_task(self._draw_often(live))
            try:
                yield
            finally:
                drawing.cancel()
                live.update(Text(), refresh=True)
        if left := [*self._folded_thinking(), *self._blocks(self._text[self._printed :])]:
            self._console.print(*left)

    async def _draw_often(self, live: Live) -> None:
        while True:
            finished = self._finished()
            live.update(self._now(), refresh=True)  # it is drawn again below what is printed now
            if finished:
                self._console.print(*finished)
            await asyncio.sleep(DRAWN_EVERY_S)

    @property
    def _text(self) -> str:
        return shown(self._turn.text)

    def _finished(self) -> list[RenderableType]:
        """Return what is to stand above from now on: it is not drawn anew."""
        text = self._text
        finished = self._folded_thinking() if text else []
        rest = text[self._printed :]
        count = finished_chars(rest)
        finished += self._blocks(rest[:count])
        self._printed += count
        return finished

    def _blocks(self, text: str) -> list[RenderableType]:
        """Return blocks of the answer, with a line between them and those above."""
        if not text.strip():
            return []
        return [*([Text()] if self._printed else []), AnswerMarkdown(text)]

    def _folded_thinking(self) -> list[RenderableType]:
        """Return the line in the place of the thinking, once, when that is over."""
        thinking = self._turn.thinking
        if self._thought_until is not None or not thinking:
            return []
        self._thought_until = time.monotonic()
        text = f"thought for {self._thought_s():.1f} s, {len(thinking.split()):,} words"
        return [Text(f"{text} (/think shows it)", style=_DIM)]

    def _thought_s(self) -> float:
        until = self._thought_until or time.monotonic()
        return until - self._turn.began_at - (self._turn.first_s or 0.0)

    def _now(self) -> RenderableType:
        """Return what stands below what is printed: the last block, or what is waited for."""
        turn = self._turn
        text = self._text[self._printed :]
        lines_max = max(1, self._console.height - SPARE_LINES)
        if text.strip():
            block = text[-LIVE_CHARS_MAX:]
            is_short = len(text) <= LIVE_CHARS_MAX
            return Tail(Group(*self._blocks(block)) if is_short else Text(block), lines_max)
        if turn.thinking:
            return self._thinking_line()
        if turn.first_s is None and turn.prompt_tokens:
            return self._prefill_bar()
        self._spinner.update(text=Text(f"{self._waited_s():.0f} s", style=_DIM))
        return self._spinner

    def _thinking_line(self) -> Text:
        end = shown_name(self._turn.thinking[-THOUGHT_CHARS_MAX:], THOUGHT_CHARS_MAX)
        head = f"thinking {self._thought_s():.0f} s: ... "
        room = max(0, self._console.width - len(head) - 1)
        return Text(head + end[-room:] if room else head, style=_DIM, no_wrap=True)

    def _prefill_bar(self) -> Table:
        turn = self._turn
        row = Table.grid(padding=(0, 1))
        row.add_row(
            Text("reading", style=_DIM),
            ProgressBar(turn.prompt_tokens, turn.done_tokens, width=30),
            Text(f"{turn.done_tokens:,} of {turn.prompt_tokens:,} tokens", style=_DIM),
            Text(f"{self._waited_s():.0f} s", style=_DIM),
        )
        return row

    def _waited_s(self) -> float:
        return time.monotonic() - self._turn.began_at
