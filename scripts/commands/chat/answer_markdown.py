"""Shows an answer's markdown while it is written: finished blocks once, the last one anew."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import Markdown
from rich.segment import Segment

from hearth.commands.terminal_text import shown

LIVE_CHARS_MAX: Final = 20_000  # of one block that is drawn anew; of a longer one the end is shown
# Tags are text here: an answer about HTML must not lose it.
_PARSER: Final = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


class AnswerMarkdown(Markdown):
    """Markdown as models write it: a line break is one, and a link shows where it leads."""

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False, code_theme="ansi_dark")
        self.parsed = list(_with_line_breaks(_PARSER.parse(text)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in super().__rich_console__(console, options):
            # An entity (&#8238;) may be what a terminal obeys.
            yield part._replace(text=shown(part.text)) if isinstance(part, Segment) else part


def _with_line_breaks(tokens: Iterable[Token]) -> Iterable[Token]:
    for token in tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
        yield token


def finished_chars(text: str) -> int:
    """Return how much of `text`, which is `shown` and a beginning, nothing that follows can change.

    It ends before the last block that has begun. The last line counts once it is whole: "1" may
    become a paragraph or an item of the list above it.
    """
    whole = text[: text.rfind("\n") + 1]
    starts = [token.map[0] for token in _PARSER.parse(whole) if token.map and _is_top(token)]
    lines = whole.split("\n")
    return sum(len(line) + 1 for line in lines[: starts[-1]]) if starts else 0


def _is_top(token: Token) -> bool:
    return token.level == 0 and token.nesting >= 0


@dataclass(frozen=True, slots=True)
class Tail:
    """The last lines of what `content` draws: what is higher than a terminal cannot be redrawn."""

    content: RenderableType
    lines_max: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.content, options.update(height=None), pad=False)
        for line in lines[-self.lines_max :]:
            yield from line
            yield Segment.line()
