"""Runs `hearth serve` for a command that started it, and ends with that command.

The command holds the other end of this process's stdin. Any death of it ends the server too,
`kill -9` included: nobody is left with a model in memory that nobody asked for.
"""

import os
import signal
import sys
import threading
from typing import Final

from hearth.commands import serve

_READ_BYTES: Final = 4096


def end_when_stdin_ends(descriptor: int = 0) -> None:
    """Wait until nobody holds the other end, then stop this process as a user would."""
    while os.read(descriptor, _READ_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    threading.Thread(target=end_when_stdin_ends, name="stdin", daemon=True).start()
    return serve.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
