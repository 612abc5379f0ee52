"""Runs the whole suite in parts, or with the argument `fast` the pure tests.

With `all` it runs also what needs the makers' templates and tokenizers, which package indexes have.
`python3 install_and_run.py test [all|fast]` starts it, with what makes MLX fast on a CPU.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Final

from tests.helpers.marks import pure_files

DONT_COMPILE: Final = "PYTHONDONTWRITEBYTECODE"
NICE_MAX: Final = 19  # takes a core only where nobody else wants it
PROCESSES_MAX: Final = 8  # each imports MLX and holds a model
# A file's tests share its server; tests/e2e/conftest.py orders the files.
LOADFILE: Final = ("--dist", "loadfile", "--no-loadscope-reorder", "--durations=15")


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class Part:
    """Some of the suite's tests, run by one pytest.

    One that computes mostly waits for nobody; a patient one takes only what others leave over.
    """

    name: str
    arguments: tuple[str, ...]
    computes: bool = False
    is_patient: bool = False


def stages() -> list[list[Part]]:
    """Return the suite's parts; those of a stage run beside each other.

    A server often waits, so that one process more than there are cores keeps them busy, and the
    property tests, which only compute and look at no clock, take what is left. Tests that look at
    the clock, or flood the machine, have a core each.
    """
    busy = f"-n{min(cores() + 1, PROCESSES_MAX)}"
    alone = f"-n{min(cores(), PROCESSES_MAX)}"
    others = ("--ignore=tests/e2e", "--ignore=tests/property")
    units = Part("unit", (busy, *others, "tests"), computes=True)
    servers = Part("e2e", (busy, *LOADFILE, "-m", "not clock", "tests/e2e"))
    properties = Part("property", (alone, "tests/property"), computes=True, is_patient=True)
    clocked = Part("e2e, clocked", (alone, *LOADFILE, "-m", "clock", "tests/e2e"))
    return [[units], [servers, properties], [clocked]]


@contextlib.contextmanager
def started(part: Part, output: IO[bytes] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Start pytest for `part`, and end it with SIGINT if we are asked to end.

    What a hundred processes import is compiled once, whatever the caller's environment says.
    """
    environ = {name: text for name, text in os.environ.items() if name != DONT_COMPILE}
    command = [sys.executable, "-m", "pytest", "-q", *part.arguments]

    def take_place() -> None:
        if part.computes:
            compute_in_turns()
        if part.is_patient:
            os.nice(NICE_MAX)

    with subprocess.Popen(command, env=environ, stdout=output, preexec_fn=take_place) as child:
        try:
            yield child
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            raise


def compute_in_turns() -> None:
    """Let this process and its children compute on where one of their threads wakes another.

    MLX wakes its own thread for each operation. Where that thread takes the core at once there are
    two changes of threads an operation, which cost a fifth of all the time.
    """
    if hasattr(os, "sched_setscheduler"):  # Linux
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def run_stage(parts: list[Part]) -> list[tuple[str, int, float]]:
    """Run `parts` at once; return the name, the exit status and the seconds of each.

    What the first one says is shown at once, what the others say once all have ended.
    """
    began = time.monotonic()
    told = []
    with contextlib.ExitStack() as stack:
        children = []
        for at, part in enumerate(parts):
            print(f"== {part.name}: pytest {' '.join(part.arguments)}", flush=True)
            output = stack.enter_context(tempfile.TemporaryFile()) if at else None
            children.append((part, stack.enter_context(started(part, output)), output))
        for part, child, output in children:
            code = child.wait()
            told.append((part.name, code, time.monotonic() - began))
            if output is not None:
                output.seek(0)
                said = output.read().decode("utf-8", "replace")
                print(f"== {part.name}:\n{said}", flush=True)
    return told


def run_all() -> int:
    """Run every part, also after one that failed; return 1 if any failed."""
    told = [row for parts in stages() for row in run_stage(parts)]
    for name, code, wall_s in told:
        print(f"== {name}: {'passed' if code == 0 else f'FAILED ({code})'} in {wall_s:.0f} s")
    return int(any(code for _, code, _ in told))


def run_fast() -> int:
    """Run the pure tests, one process for each core, with few examples of each property."""
    os.environ.setdefault("HEARTH_HYPOTHESIS_PROFILE", "few")
    processes = min(cores(), PROCESSES_MAX)
    pure = (f"-n{processes}", "-m", "pure", *pure_files())
    ((_, code, _),) = run_stage([Part("fast", pure, computes=True)])
    return code


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if arguments == ["all"]:
        os.environ["HEARTH_REAL_TEMPLATES"] = "1"  # tests/helpers/families/real_templates.py
    try:
        return run_fast() if arguments == ["fast"] else run_all()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
