"""Sets up logging: one line an event, key=value, to stderr. Never prompts or keys."""

import logging
import sys
import traceback
from types import TracebackType
from typing import Final

OURS: Final = ("hearth", "proxy", "worker", "shared")  # loggers whose level is the user's
_FORMAT: Final = "%(asctime)s {process} %(levelname).1s %(message)s"

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


def configure(level: str, process: str, shows_text: bool = False) -> None:
    """Send this process's log to stderr, each line marked with `process`.

    `shows_text`: of exceptions, which may quote what was asked.
    """
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter if shows_text else Discreet
    handler.setFormatter(formatter(_FORMAT.format(process=process), "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(level)
