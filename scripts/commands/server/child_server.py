"""Starts a server as a child of a command, reads how far it has come, and ends it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from hearth.commands.service.service_manager import STOP_S
from hearth.shared.errors import StartError
from hearth.shared.private_files import private_directory

COMMAND: Final = (sys.executable, "-P", "-m", "hearth.commands.server.serve_until_stdin_ends")
LINES_TOLD: Final = 12  # of the log of a start that failed
TAIL_BYTES_MAX: Final = 16_384
# As worker/threads/start_worker.py writes it.
_STEP: Final = re.compile(r"loading step=(\S+) s=\d+(?: held_mb=(\d+) of_mb=(\d+))?")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class ChildServer:
    """One `hearth serve` in a session of its own, so that Ctrl-C in the terminal is not for it.

    It ends by `end`, or with this process, whatever ends that. A process that this one becomes
    (exec) does not keep it.
    """

    def __init__(self, port: int, model: str, directory: Path) -> None:
        """`model` is as in MODEL_PATH, "" = what the settings say; the log is in `directory`.

        Raises:
            StartError: the directory is of no use.
        """
        self.port = port
        self.directory = directory
        self.log = private_directory(directory) / "serve.log"
        options = ["--port", str(port), *(["--model", model] if model else [])]
        own = self.log.with_suffix(f".{os.getpid()}")  # another command may start one at once
        own.unlink(missing_ok=True)
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        own.replace(self.log)
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                [*COMMAND, *options],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def last_lines(self, count: int = LINES_TOLD) -> list[str]:
        """Return the end of its log, without what a terminal would obey."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES_MAX))
            lines = file.read().decode(errors="replace").splitlines()
        return [_CONTROL.sub(" ", line) for line in lines[-count:]]

    def loading(self) -> tuple[str, int, int]:
        """Return the step of its load, and how many MB are there, of how many; 0 = not known."""
        for line in reversed(self.last_lines(50)):
            if found := _STEP.search(line):
                return found[1], int(found[2] or 0), int(found[3] or 0)
        return "", 0, 0

    def failure(self) -> StartError:
        """Return what its log says of a start that failed, with the path of the log."""
        ended = f" (exit status {self.exit_status})" if self.exit_status is not None else ""
        lines = "\n".join(f"  {line}" for line in self.last_lines())
        return StartError(f"The server did not start{ended}. The end of {self.log}:\n{lines}")

    def end(self) -> None:
        """End it as a user would; Ctrl-C meanwhile has its workers killed amid their work."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except KeyboardInterrupt:
            self._process.send_signal(signal.SIGTERM)
            self._kill_unless_ended()
        except subprocess.TimeoutExpired:
            self._kill_unless_ended()
        finally:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _kill_unless_ended(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        self._process.kill()
        self._process.wait()
