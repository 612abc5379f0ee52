"""Starts a worker process of either kind by its supervisor's arguments, or says why it cannot."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.shared.process_start import begin_process
from hearth.shared.settings import Settings
from hearth.shared.worker_files import leave_reason


def run_worker(
    prog: str, about: str | None, kind: str, make: Callable[[Settings, argparse.Namespace], Any]
) -> int:
    """Make a worker and run it until it ends; return its exit code. Its log names `kind`."""
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("--worker-id", type=int, required=True)
    parser.add_argument("--endpoint", required=True, help="ipc://PATH, the supervisor's")
    parser.add_argument("--listen", default="", help="tcp://ADDRESS:PORT, for other machines")
    options = parser.parse_args()
    try:
        worker = make(begin_process(f"{kind}-{options.worker_id}"), options)
    except StartError as error:
        return refuse_start(options.endpoint, error)
    return int(worker.run())


def refuse_start(endpoint: str, error: StartError) -> int:
    """Say in the log and to the supervisor why a worker cannot start; return its exit code."""
    print(f"Hearth cannot start: {error}", file=sys.stderr, flush=True)
    leave_reason(endpoint, str(error))
    return EXIT_CANNOT_START
