"""Runs the workers of a chaos run: real ones, short of memory as a file says, broken by marks."""

import os
import sys
from pathlib import Path

from scripts.harness.faulty_workers import poisoned_worker
from scripts.harness.mac import pressed_worker


def main() -> int:
    endpoint = sys.argv[sys.argv.index("--endpoint") + 1]
    poisoned_worker.poison(Path(endpoint.removeprefix("ipc://")).parents[1])
    return pressed_worker.main()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads that use MLX must not outlive the interpreter
