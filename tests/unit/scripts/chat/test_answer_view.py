"""The drawing of an answer is checked here: markdown, the wait, the prefill, the thinking."""

import asyncio
import io

from rich.console import Console

from hearth.commands.chat.answer_stream import Turn
from hearth.commands.chat.answer_view import DRAWN_EVERY_S, AnswerView

WIDTH, HEIGHT = 60, 12


def console() -> Console:
    """A terminal of 12 lines that remembers what it is sent."""
    return Console(
        file=io.StringIO(), force_terminal=True, width=WIDTH, height=HEIGHT, color_system=None
    )


def drawn(content: object) -> list[str]:
    with (screen := console()).capture() as capture:
        screen.print(content)
    return [line.rstrip() for line in capture.get().splitlines()]


def chunk(**delta: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def shown_of(turn: Turn, *steps: dict[str, object]) -> str:
    """Return all that the terminal is sent while `turn` takes `steps`, each drawn once."""
    screen = console()

    async def talk() -> None:
        async with AnswerView(screen, turn).drawn():
            for step in steps:
                turn.take(step)
                await asyncio.sleep(DRAWN_EVERY_S * 1.5)

    asyncio.run(talk())
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_thinking_is_a_line_while_it_lasts_and_a_line_when_it_is_over() -> None:
    thoughts = "First of all. " * 40
    screen = shown_of(Turn(), chunk(reasoning_content=thoughts), chunk(content="So."))
    assert "thinking 0 s: ..." in screen and thoughts not in screen
    assert "120 words (/think shows it)" in screen
    assert screen.index("120 words") < screen.rindex("So.")
    last_lines = screen.rsplit("120 words", 1)[1]
    assert "First of all" not in last_lines


def test_each_block_stands_above_the_cursor_once_and_in_order() -> None:
    blocks = ["First one.\n\n", "Second ", "one.\n\n", "```\ncode\n", "```\n\nLast\n"]
    screen = shown_of(Turn(), *(chunk(content=text) for text in blocks))
    last = screen.rsplit("\x1b[?25h", 1)[1]  # from here on nothing is drawn anew
    assert "Last" in last and "code" not in last
    places = [screen.rindex(text) for text in ("First one.", "Second one.", "code", "Last")]
    assert places == sorted(places)
