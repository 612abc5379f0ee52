"""Runs the whole suite in parts, or with the argument `fast` the pure tests.

`python3 install_and_run.py test [fast]` starts it, with what makes MLX fast on a CPU.
"""

import os
import signal
import subprocess
import sys
import time
from typing import Final

from tests.helpers.marks import pure_files

DONT_COMPILE: Final = "PYTHONDONTWRITEBYTECODE"
PROCESSES_MAX: Final = 8  # each imports MLX and holds a model
# A file's tests share its server; tests/e2e/conftest.py orders the files.
LOADFILE: Final = ("--dist", "loadfile", "--no-loadscope-reorder", "--durations=15")


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parts() -> dict[str, list[str]]:
    """Return pytest's arguments for each part of the suite.

    A server often waits, so that one process more than there are cores keeps them busy. Tests that
    look at the clock, or flood the machine, have a core each.
    """
    busy = f"-n{min(cores() + 1, PROCESSES_MAX)}"
    clocked = f"-n{min(cores(), PROCESSES_MAX)}"
    return {
        "unit and property": [busy, "--ignore=tests/e2e", "tests"],
        "e2e": [busy, *LOADFILE, "-m", "not clock", "tests/e2e"],
        "e2e, clocked": [clocked, *LOADFILE, "-m", "clock", "tests/e2e"],
    }


def run_part(arguments: list[str]) -> int:
    """Run pytest with `arguments` and return its exit status, also when we are asked to end.

    What a hundred processes import is compiled once, whatever the caller's environment says.
    """
    environ = {name: text for name, text in os.environ.items() if name != DONT_COMPILE}
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    with subprocess.Popen(command, env=environ) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            raise


def run_all() -> int:
    """Run every part, also after one that failed; return 1 if any failed."""
    told = []
    for name, arguments in parts().items():
        print(f"== {name}: pytest {' '.join(arguments)}", flush=True)
        began = time.monotonic()
        code = run_part(arguments)
        told.append((name, code, time.monotonic() - began))
    for name, code, wall_s in told:
        print(f"== {name}: {'passed' if code == 0 else f'FAILED ({code})'} in {wall_s:.0f} s")
    return int(any(code for _, code, _ in told))


def run_fast() -> int:
    """Run the pure tests, one process for each core, with few examples of each property."""
    os.environ.setdefault("HEARTH_HYPOTHESIS_PROFILE", "few")
    processes = min(cores(), PROCESSES_MAX)
    return run_part([f"-n{processes}", "-m", "pure", *pure_files()])


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run_fast() if arguments == ["fast"] else run_all()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
