"""Sets up logging to stderr: one line of key=value per event, never prompts or API keys."""

import logging
import sys
import traceback
from types import TracebackType
from typing import Final

OURS: Final = ("hearth", "proxy", "worker", "shared")  # loggers that LOG_LEVEL sets
_FORMAT: Final = "%(asctime)s {process} %(levelname).1s %(message)s"

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class DiscreetFormatter(logging.Formatter):
    """Formats an exception's traceback without its text, which may quote a prompt."""

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

    `shows_text` includes the texts of exceptions, which may quote prompts.
    """
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter if shows_text else DiscreetFormatter
    handler.setFormatter(formatter(_FORMAT.format(process=process), "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(level)
