"""Runs one risky task in a process of its own, which gets no secrets and ends afterwards.

A crash or a leak in the task harms no other request. The task's module limits its own resources
with `process_limits`. Long-lived processes are workers; see the supervisor.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from subprocess import DEVNULL, PIPE


class HelperLost(Exception):
    """The process gave no answer in time, or too long an answer. The text says which."""


async def run_helper(
    module: str, data: bytes, wait_s: float, answer_bytes_max: int
) -> tuple[bytes, int]:
    """Run Hearth's `module` on `data`; return its answer and exit status (Popen's returncode).

    The module reads its standard input to the end, then writes to its standard output. No process
    is left behind, even after a cancellation or an error.

    Raises:
        HelperLost: the process did not end within `wait_s`, or its answer is too long.
    """
    process = subprocess.Popen(
        (sys.executable, "-P", "-m", module),  # -P: no import from the working directory
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,  # its text may quote the input
        env=_environment(),
        start_new_session=True,  # not stopped by Ctrl-C at the server's terminal
    )
    asking = asyncio.create_task(asyncio.to_thread(_communicate, process, data, answer_bytes_max))
    try:
        async with asyncio.timeout(wait_s):
            answer = await asyncio.shield(asking)
    except TimeoutError:
        raise HelperLost(f"gave no answer within {wait_s:g} s") from None
    finally:
        process.kill()  # ends the thread's wait, too
        await asyncio.wait([asking])
    if len(answer) > answer_bytes_max:
        raise HelperLost(f"answered more than {answer_bytes_max:,} bytes")
    return answer, process.returncode


def _communicate(process: subprocess.Popen[bytes], data: bytes, answer_bytes_max: int) -> bytes:
    """Send `data` to the process and return its answer once it has ended. Blocks its thread."""
    with process:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # may have ended
            stdin.write(data)
        answer = process.stdout.read(answer_bytes_max + 1)
        if len(answer) > answer_bytes_max:
            process.kill()
        return answer


def _environment() -> dict[str, str]:
    """Return the process's environment: no API keys, and no PATH to programs."""
    kept_variables = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
    return kept_variables | {"PATH": os.devnull, "MALLOC_ARENA_MAX": "1"}
