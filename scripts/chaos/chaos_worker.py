"""Runs the workers of a chaos run: real ones, short of memory as a file says, broken by marks."""

import importlib
import os
import sys
from pathlib import Path

from scripts.chaos.scene import POISONED, can_be_poisoned
from scripts.harness.mac import pressed_worker


def main() -> int:
    endpoint = sys.argv[sys.argv.index("--endpoint") + 1]
    if can_be_poisoned():
        run_dir = Path(endpoint.removeprefix("ipc://")).parents[1]
        importlib.import_module(POISONED).poison(run_dir)
    return pressed_worker.main()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads that use MLX must not outlive the interpreter
