"""Runs the suite's three circles: `fast`, what a user was promised, and with `all` everything.

`python3 install_and_run.py test [all|fast]` starts it, with what makes MLX fast on a CPU. Each run
has the surroundings of a stranger's machine (tests/helpers/drawn_environment.py).
"""

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from tests.helpers.drawn_environment import drawn_surroundings
from tests.helpers.marks import PROJECT_DIR, pure_files

PROCESSES_MAX: Final = 8  # each imports MLX and holds a model
# What `test` leaves to `test all`, by its mark.
LEFT: Final = ("night", "browser", "clients", "weights")
LEFT_OUT: Final = f"not ({' or '.join(LEFT)})"
# A file's tests share its server; tests/conftest.py orders the files.
BY_FILE: Final = ("--dist", "loadfile", "--no-loadscope-reorder", "--durations=15")
NIGHT: Final = PROJECT_DIR / ".pytest_cache/night"  # holds when `test all` ran last
NIGHT_AGE_MAX: Final = timedelta(days=7)
FAULTS: Final = ("-m", "scripts.faults")
BEYOND_PYTEST: Final = {
    "other projects' suites": ("bash", ".ci/nightly"),
    "chaos": (sys.executable, *FAULTS, "chaos"),
    "soak": (sys.executable, *FAULTS, "soak"),
    "what time tells": (sys.executable, *FAULTS, "keys"),
    "ranks": (sys.executable, *FAULTS, "ranks"),
}


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pytest_of(*arguments: str, processes: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", "-q", f"-n{min(processes, PROCESSES_MAX)}", *arguments)


def parts_of(circle: str) -> dict[str, tuple[str, ...]]:
    """Return the commands of a circle by their names; each runs alone.

    A server often waits, so that one process more than there are cores keeps them busy.
    """
    if circle == "fast":
        return {"fast": pytest_of("-m", "pure and not night", *pure_files(), processes=cores())}
    if circle == "test":
        return {"test": pytest_of(*BY_FILE, "-m", LEFT_OUT, "tests", processes=cores() + 1)}
    seed = f"--hypothesis-seed={random.SystemRandom().randrange(10**9)}"
    every = pytest_of(*BY_FILE, seed, "tests", processes=cores() + 1)
    return {"everything": every} | BEYOND_PYTEST


def run(name: str, command: tuple[str, ...], environ: dict[str, str]) -> int:
    """Run a part and return its exit status; it ends with SIGINT if we are asked to end."""
    print(f"== {name}: {' '.join(command)}", flush=True)
    with subprocess.Popen(command, env=environ, cwd=PROJECT_DIR) as child:
        try:
            return child.wait()
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


def night_told(path: Path, now: datetime) -> str:
    """Return when `test all` last ran here, and whether that is too long ago."""
    if not path.exists():
        return "`test all` never ran here"
    ran, outcome = path.read_text("utf-8").split(maxsplit=1)
    age = now - datetime.fromisoformat(ran)
    told = f"`test all` ran here {age.days} days ago and {outcome}"
    return told if age <= NIGHT_AGE_MAX else f"{told}: it is time to run it again"


def run_circle(circle: str) -> int:
    """Run all parts of `circle`, also after one that failed; return 1 if any failed."""
    compute_in_turns()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a hundred processes import the same
    os.environ["HEARTH_HYPOTHESIS_PROFILE"] = circle
    began = time.monotonic()
    with drawn_surroundings() as environ:
        failed = [name for name, command in parts_of(circle).items() if run(name, command, environ)]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcome = f"FAILED: {', '.join(failed)}" if failed else "passed"
    wall_s, cpu_s = time.monotonic() - began, used.ru_utime + used.ru_stime
    print(f"== {circle}: {outcome}, in {wall_s:.0f} s and {cpu_s:.0f} s of CPU")
    now = datetime.now(UTC)
    if circle == "all":
        NIGHT.parent.mkdir(exist_ok=True)
        NIGHT.write_text(f"{now.isoformat()} {outcome}", "utf-8")
    else:
        print("== the rest: `python3 install_and_run.py test all`, or")
        print("== `python3 install_and_run.py test -m 'browser or clients'`, one mark or another")
        print(f"== {night_told(NIGHT, now)}")
    return int(bool(failed))


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run_circle(*arguments or ["test"])
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
