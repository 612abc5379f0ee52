"""Has one thing done in a process of its own, which knows nothing of ours and is gone afterwards.

For what may go wrong in any way: it takes no other along. Its module limits itself, by
`process_limits`. A worker is for what goes on; see the supervisor.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from subprocess import DEVNULL, PIPE


class HelperLost(Exception):
    """The process gave no answer in time, or one without an end. Its text says which."""


async def run_helper(
    module: str, data: bytes, wait_s: float, answer_bytes_max: int
) -> tuple[bytes, int]:
    """Return what `module` of ours answers to `data`, and its exit status: as Popen's returncode.

    It reads its standard input to the end, then writes to its standard output. Cancelled, or at any
    error, it leaves no process behind.

    Raises:
        HelperLost: there was no end of it within `wait_s`, or its answer is too long.
    """
    process = subprocess.Popen(
        (sys.executable, "-P", "-m", module),  # -P: the directory may be anybody's
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,  # it may quote what it is told
        env=_environment(),
        start_new_session=True,  # Ctrl-C at the server's terminal is not for it
    )
    asking = asyncio.create_task(asyncio.to_thread(_ask, process, data, answer_bytes_max))
    try:
        async with asyncio.timeout(wait_s):
            answer = await asyncio.shield(asking)
    except TimeoutError:
        raise HelperLost(f"gave no answer within {wait_s:g} s") from None
    finally:
        process.kill()  # which ends the thread's wait too
        await asyncio.wait([asking])
    if len(answer) > answer_bytes_max:
        raise HelperLost(f"answered more than {answer_bytes_max:,} bytes")
    return answer, process.returncode


def _ask(process: subprocess.Popen[bytes], data: bytes, answer_bytes_max: int) -> bytes:
    """Tell the process `data` and return its answer, once it has ended. Blocks its own thread."""
    with process:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it may have ended
            stdin.write(data)
        answer = process.stdout.read(answer_bytes_max + 1)
        if len(answer) > answer_bytes_max:
            process.kill()
        return answer


def _environment() -> dict[str, str]:
    """Return its environment: no key of ours, and no path to programs that a library may call."""
    kept = {name: told for name, told in os.environ.items() if name == "PYTHONPATH"}
    return kept | {"PATH": os.devnull, "MALLOC_ARENA_MAX": "1"}
