"""Logging for every process: one line an event, key=value, to stderr. Never prompts or keys."""

import logging
import sys


def configure(level: str, process: str) -> None:
    """Send this process's log to stderr, each line marked with `process`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {process} %(levelname).1s %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for ours in ("hearth", "proxy", "worker", "shared"):
        logging.getLogger(ours).setLevel(level)
