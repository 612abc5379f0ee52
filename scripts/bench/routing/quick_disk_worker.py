"""Runs a real worker whose files are not synced: its model computes faster than a disk syncs.

A real model takes seconds for a chunk whose file takes a tenth of one. With a model that takes
milliseconds the disk would lag behind as it never does.
"""

import os
import sys
from unittest import mock

from hearth.worker import main as real


def main() -> int:
    with mock.patch.object(os, "fsync", lambda _handle: None):
        return real.main()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads that use MLX must not outlive the interpreter
