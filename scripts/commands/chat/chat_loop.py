"""Leads a conversation in the terminal: reads a line, does what it asks, shows the answer."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from hearth.commands.chat.answer_stream import CUT_SHORT, Turn, ask
from hearth.commands.chat.answer_view import AnswerView
from hearth.commands.chat.conversation import (
    Conversation,
    ImageError,
    ImageFile,
    image_paths,
    read_image,
)
from hearth.commands.chat.turn_figures import footer, why_lines
from hearth.commands.server.find_or_start import RunningServer, names_served, with_model
from hearth.commands.terminal_text import shown, shown_name
from hearth.shared.errors import StartError

PROMPT: Final = "> "
MORE: Final = ". "
FENCE: Final = '"""'
HELP: Final = {
    "/why": "what the last answer cost, and what the cache did",
    "/think": "shows the thinking before the last answer",
    "/image PATH": "sends an image with the next message; a path in a message does so too",
    "/model [NAME]": "goes on with another model of the server; without a name, lists them",
    "/clear": "begins a new conversation",
    "/help": "shows this",
    "/bye": "ends, as Ctrl-D does; Ctrl-C stops an answer",
}


def command_of(line: str) -> tuple[str, str]:
    """Return the command of `line`, and what stands behind it; "" where it is a message.

    A path begins with a slash too: what has another one in its first word is no command.
    """
    word, _, rest = line.strip().partition(" ")
    if not word.startswith("/") or "/" in word[1:] or word == "/":
        return "", line
    return word, rest.strip()


@dataclass(slots=True)
class Chat:
    """One conversation with one server, on one terminal."""

    server: RunningServer
    console: Console
    read_line: Callable[[str], str]  # raises EOFError, KeyboardInterrupt
    conversation: Conversation = field(default_factory=Conversation)
    turn: Turn | None = None  # the last one
    images: list[ImageFile] = field(default_factory=list)  # for the next message

    def run(self) -> None:
        """Go on until the user ends it."""
        self.say(f"{self.server.model} at {self.server.base_url}{self._about_context()}", "bold")
        self.say("/help lists the commands; Ctrl-D ends.", "dim")
        while True:
            try:
                line = self._read_message()
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self.console.print()
                self.say("Ctrl-D ends.", "dim")
                continue
            command, rest = command_of(line)
            if command in ("/bye", "/exit", "/quit"):
                return
            if command:
                self._obey(command, rest)
            elif line.strip():
                self._send(line)

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(shown(text), style=style))

    def _about_context(self) -> str:
        tokens = self.server.context_tokens
        return f", {tokens:,} tokens of context" if tokens else ""

    def _read_message(self) -> str:
        """Return a line, or all lines between two of three quotes."""
        line = self.read_line(PROMPT)
        if not line.lstrip().startswith(FENCE):
            return line
        text = line.lstrip().removeprefix(FENCE)
        while not text.rstrip().endswith(FENCE):
            text += "\n" + self.read_line(MORE)
        return text.rstrip().removesuffix(FENCE).strip("\n")

    # ------------------------------------------------------------ commands

    def _obey(self, command: str, rest: str) -> None:
        if command == "/help":
            width = max(map(len, HELP))
            self.say("\n".join(f"  {name:{width}}  {about}" for name, about in HELP.items()))
        elif command == "/clear":
            self.conversation, self.turn, self.images = Conversation(), None, []
            self.say("A new conversation.", "dim")
        elif command == "/image":
            self._add_image(Path(next(iter(image_paths(rest).values()), Path(rest).expanduser())))
        elif command == "/model":
            self._change_model(rest)
        elif command in ("/why", "/think"):
            self._tell_of_turn(command)
        else:
            self.say(f"{command} is no command; /help lists them.", "red")

    def _tell_of_turn(self, command: str) -> None:
        if self.turn is None:
            self.say("Nothing was answered yet.", "dim")
        elif command == "/why":
            key = " --key $PROXY_API_KEY" if self.server.key else ""
            lines = why_lines(self.turn, self.conversation.session, self.server.base_url + key)
            self.say("\n".join(lines))
        else:
            thinking = self.turn.thinking.strip() or "The last answer has none."
            self.console.print(Padding(Text(shown(thinking), style="dim"), (0, 0, 0, 2)))

    def _add_image(self, path: Path) -> bool:
        """Have the next message bring the image; say why where it cannot."""
        if not self.server.takes_images:
            self.say(f"{self.server.model} takes no images.", "red")
            return False
        try:
            self.images.append(read_image(path))
        except ImageError as error:
            self.say(str(error), "red")
            return False
        self.say(f"With the message: {path.name}", "dim")
        return True

    def _change_model(self, name: str) -> None:
        try:
            if name:
                with self.console.status(Text(f"loading {shown_name(name)}", style="dim")):
                    self.server = with_model(self.server, name)
                self.say(f"{self.server.model}{self._about_context()}", "dim")
                return
            for row in names_served(self.server):
                self.say(f"{'*' if row == self.server.model else ' '} {shown_name(row)}")
        except KeyboardInterrupt:
            self.say(f"{self.server.model} goes on", "dim")
        except StartError as error:
            self.say(str(error), "red")

    # ------------------------------------------------------------ asking

    def _send(self, line: str) -> None:
        for word, path in image_paths(line).items():
            if self._add_image(path):
                line = line.replace(word, path.name)
        self.conversation.question(line, self.images)
        self.turn = turn = Turn()
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(self.answer(turn))
        if self.conversation.answered(turn):
            self.images = []
        self._tell_end(turn)

    async def answer(self, turn: Turn) -> None:
        """Ask, and draw what comes until the answer ends or is cancelled."""
        body = self.conversation.body(self.server.model, self.server.context_tokens)
        async with AnswerView(self.console, turn).drawn():
            await ask(self.server, body, self.conversation.session, turn)

    def _tell_end(self, turn: Turn) -> None:
        if turn.error:
            self.say(turn.error, "red")
        elif not turn.reading.is_complete:
            self.say("stopped", "dim")
        elif turn.finish_reason == "length":
            self.say(f"{CUT_SHORT} /clear begins anew.", "yellow")
        if line := footer(turn):
            self.say(f"{line} (/why)", "dim")
        self.console.print()
