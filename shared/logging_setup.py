"""Sets up logging: one line an event, key=value, to stderr. Never prompts or keys.

On a terminal the proxy draws a line of progress, which each line of the log clears first.
"""

import logging
import os
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Final, TextIO

OURS: Final = ("hearth", "proxy", "worker", "shared")  # loggers whose level is the user's
_FORMAT: Final = "%(asctime)s {process} %(levelname).1s %(message)s"

CLEAR_LINE: Final = "\r\x1b[K"  # to the line's begin, and what stands there away

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class Discreet(logging.Formatter):
    """Shows where an exception came from, not its text: that may quote a prompt."""

    def formatException(self, ei: ExcInfo) -> str:
        lines = []
        error = ei[1]
        while error is not None:
            lines += traceback.format_tb(error.__traceback__)
            lines.append(f"{type(error).__name__} (LOG_PROMPTS=true shows its text)\n")
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "".join(lines).rstrip()


def is_terminal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether `stream` is a terminal that can clear a line, as the TERM of `environ` says."""
    return stream.isatty() and environ.get("TERM", "") not in ("", "dumb")


def configure(level: str, process: str, shows_text: bool = False) -> None:
    """Send this process's log to stderr, each line marked with `process`.

    `shows_text`: of exceptions, which may quote what was asked.
    """
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter if shows_text else Discreet
    begin = CLEAR_LINE if is_terminal(sys.stderr, os.environ) else ""
    handler.setFormatter(formatter(begin + _FORMAT.format(process=process), "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(level)
