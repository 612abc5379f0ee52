"""Answers one question in plain text on stdout, for pipes and scripts; all else goes to stderr."""

import sys
from typing import Final, TextIO

from rich.console import Console
from rich.text import Text

from hearth.commands.chat.answer_stream import CUT_SHORT, Turn, ask
from hearth.commands.chat.conversation import Conversation, ImageError, image_paths, read_image
from hearth.commands.server.find_or_start import RunningServer
from hearth.commands.terminal_text import shown, shown_name

ANSWERED: Final = 0
BROKEN: Final = 1


class PlainWriter:
    """Writes a turn's text while it comes; until it begins, a line on a terminal says what is done.

    Owner: the event loop that reads the turn.
    """

    def __init__(self, turn: Turn, out: TextIO) -> None:
        self._turn = turn
        self._out = out
        self._parts = 0  # of the turn's text, that are written
        self._ends_line = False
        self._status = Console(stderr=True).status("waiting")

    def __enter__(self) -> "PlainWriter":
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def write_news(self) -> None:
        turn = self._turn
        text = "".join(turn.reading.text[self._parts :])
        self._parts = len(turn.reading.text)
        if text:
            self._status.stop()
            self._out.write(shown(text))
            self._out.flush()
            self._ends_line = text.endswith("\n")
        elif turn.first_s is None and turn.prompt_tokens:
            told = f"reading {turn.done_tokens:,} of {turn.prompt_tokens:,} tokens"
            self._status.update(Text(told))
        elif turn.thinking and not turn.text:
            self._status.update(Text("thinking"))

    def end_line(self) -> None:
        if self._turn.text and not self._ends_line:
            self._out.write("\n")
            self._out.flush()


async def answer_once(server: RunningServer, question: str, out: TextIO) -> int:
    """Write the answer to `out`; return the exit status. Images are sent by their paths in it."""
    conversation, turn = Conversation(), Turn()
    paths = list(image_paths(question).values())
    if paths and not server.takes_images:
        print(
            f"{shown_name(server.model)} takes no images: only the words are sent.", file=sys.stderr
        )
        paths = []
    try:
        images = [read_image(path) for path in paths]
    except ImageError as error:
        print(error, file=sys.stderr)
        return BROKEN
    conversation.question(question, images)
    body = conversation.body(server.model, server.context_tokens)
    with PlainWriter(turn, out) as writer:
        await ask(server, body, conversation.session, turn, writer.write_news)
        writer.end_line()
    problem = turn.error or (CUT_SHORT if turn.finish_reason == "length" else "")
    if problem:
        print(shown(problem), file=sys.stderr)
    return BROKEN if problem else ANSWERED
