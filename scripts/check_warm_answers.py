#!/usr/bin/env python
"""Runs the warm = cold properties on new examples, beside busy processes and in poisoned memory.

    python -m scripts.check_warm_answers [--minutes 15] [--burners 2] [PATH ...]

The tests (tests/property/warm, or those under each PATH) come in random order, over and over until
the time is out or a round failed. MLX keeps no buffer, and malloc fills what it gives and takes
back: a float32 that nobody wrote is 3e38. Each round tells how many answers were compared to the
bit and by token, and the ties.
Exit status 0: no answer differed but at a tie; 1: one did, or too many were ties.
"""

import argparse
import ctypes
import os
import random
import subprocess
import sys
import time
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest

from hearth.shared.openblas_preload import openblas_environment

POISON: Final = 0x80  # of what is freed; what is allocated is filled with its complement
UNTIL: Final = "HEARTH_TESTS_UNTIL"  # seconds since the epoch
FLOATS: Final = 4096  # 16 kB: of malloc's heap, where what is freed can still be read


def run(options: argparse.Namespace) -> int:
    until = time.time() + options.minutes * 60
    environ = os.environ | openblas_environment(os.environ) | {UNTIL: str(until)}
    environ |= {"MALLOC_PERTURB_": str(POISON), "HEARTH_EXAMPLES": "2"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", __spec__.name]
    busy = [sys.executable, "-c", "while True: pass"]
    burners = [subprocess.Popen(busy) for _ in range(options.burners)]
    code = 0
    try:
        while not code and time.time() < until:
            code = subprocess.call([*command, *options.paths], env=environ)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    return code


# ---------------------------------------------------------------- as a plugin of pytest


def pytest_sessionstart() -> None:
    mx.set_cache_limit(0)
    assert poisoned_share() > 0.9, "what is freed is not poisoned: is this glibc?"


def pytest_collection_modifyitems(items: list[Any]) -> None:
    random.shuffle(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol() -> bool | None:
    """Leave out the tests that come after the time is out."""
    return time.time() > float(os.environ[UNTIL]) or None


def poisoned_share() -> float:
    """Return which share of the bytes of an array that was dropped is poison."""
    array = mx.ones(FLOATS)
    mx.eval(array)
    address = np.asarray(array).ctypes.data
    del array
    left = np.frombuffer(ctypes.string_at(address, 4 * FLOATS), np.uint8)
    return float(np.isin(left, (POISON, 0xFF ^ POISON)).mean())  # the copy may lie there itself


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--burners", type=int, default=2, metavar="N", help="busy processes")
    parser.add_argument("paths", nargs="*", default=["tests/property/warm"], metavar="PATH")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run(options_of(sys.argv[1:])))
