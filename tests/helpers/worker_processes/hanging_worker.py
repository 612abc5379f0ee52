"""Runs a real worker whose inference thread hangs while it decodes.

It does so for ever, as in a stuck driver, at the second token of an answer, while the file
HANG_WHILE exists. Its other threads live on: heartbeats go out and say what it holds.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

from hearth.worker.engine.decode.decoder import Decoder


class HangingDecoder(Decoder):
    """Decodes one token, then none."""

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self._hanging_steps = 0

    def step(self) -> Any:
        if Path(os.environ["HANG_WHILE"]).exists():
            self._hanging_steps += 1
            if self._hanging_steps > 1:
                threading.Event().wait()
        return super().step()


def main() -> int:
    with mock.patch("hearth.worker.engine.engine.Decoder", HangingDecoder):
        from hearth.worker import main as real

        return real.main()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads that use MLX must not outlive the interpreter
