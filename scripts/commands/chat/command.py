"""Talks with a model in the terminal; starts a server where none runs, and ends it afterwards.

    hearth run                                    with the model that the settings name
    hearth run mlx-community/Qwen3-8B-4bit        with this one
    hearth run smollm2 "What is a hash table?"    answers once, in plain text
    git diff | hearth run smollm2 "Is it right?"  the question, and what is piped in behind it

In the chat /help lists the commands; Ctrl-C stops an answer, Ctrl-D ends. An image is sent by its
path in a message. The address and the key are those of the settings (PROXY_HOST, PROXY_PORT,
PROXY_API_KEY). Nothing that is said is kept when it ends, beside the server's cache.
Exit status 0: it was answered; 1: an answer broke off; 2: there is no server that serves the model.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from rich.console import Console

from hearth.commands.chat.chat_loop import Chat
from hearth.commands.chat.one_answer import BROKEN, answer_once
from hearth.commands.server.find_or_start import RunningServer, find_or_start
from hearth.commands.terminal_text import shown
from hearth.shared.errors import StartError
from hearth.shared.machine import bytes_for_models
from hearth.shared.models.model_path import SMOLLM2, builtin_model, first_model_words
from hearth.shared.paths import env_file
from hearth.shared.settings import load_settings

NO_SERVER = 2


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hearth run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="", help="a name, hub id or directory"
    )
    parser.add_argument("question", metavar="QUESTION", nargs="*", help="answered once")
    return parser.parse_args(arguments)


def question_of(words: Sequence[str]) -> str:
    """Return what is asked once, from the command line and from a pipe; "" for a chat."""
    asked = " ".join(words)
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    return "\n\n".join(part for part in (asked, piped.strip("\n")) if part)


def say_what_it_is(server: RunningServer, console: Console) -> None:
    """Say on a terminal, first of all, what may be expected of the model that comes with Hearth."""
    if console.is_terminal and builtin_model(server.model) is SMOLLM2:
        console.print(first_model_words(bytes_for_models()), markup=False)


def chat_in_terminal(options: argparse.Namespace) -> int:
    import readline  # edits the line that `input` reads, and remembers those before it

    readline.set_auto_history(True)
    with find_or_start(load_settings(os.environ, env_file()), options.model) as server:
        # A signal that comes just before `input` waits stays unseen until the next one, or a key.
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
        try:
            console = Console(highlight=False)
            say_what_it_is(server, console)
            Chat(server, console, input).run()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    return 0


def answer_to_stdout(options: argparse.Namespace, question: str) -> int:
    with find_or_start(load_settings(os.environ, env_file()), options.model) as server:
        say_what_it_is(server, Console(stderr=True, highlight=False))
        try:
            return asyncio.run(answer_once(server, question, sys.stdout))
        except OSError as error:  # who reads has enough, or the disk is full
            if not isinstance(error, BrokenPipeError):
                print(f"The answer cannot be written: {error.strerror}.", file=sys.stderr)
            # Nothing may be flushed at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    _open_closed_streams()
    is_chat = sys.stdin.isatty() and sys.stdout.isatty() and not options.question
    question = "" if is_chat else question_of(options.question)
    if not is_chat and not question:
        print('Nothing is asked. Ask once: hearth run MODEL "QUESTION"', file=sys.stderr)
        return NO_SERVER
    try:
        return chat_in_terminal(options) if is_chat else answer_to_stdout(options, question)
    except StartError as error:
        print(shown(str(error)), file=sys.stderr)
        return NO_SERVER


def _open_closed_streams() -> None:
    """A scheduler may start a command without them: nothing is read, and what is said is lost."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End as after an error: what was started is ended, and the terminal is put back."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
