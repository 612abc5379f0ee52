"""Works on large bodies in threads, so that the event loop goes on serving small ones.

What Python does in such a thread takes turns with the event loop; one C call on a body does not,
and those take tenths of a second at the most that a body may hold.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

SMALL_BYTES_MAX: Final = 256 * 1024  # of a body whose work stays on the event loop: some 10 ms
MIDDLE_BYTES_MAX: Final = 4 * 1024 * 1024  # a session's body, which never waits for a larger one

# One thread each: of two that compete for the interpreter the event loop gets a third.
_middle: Final = ThreadPoolExecutor(1, "bodies")
_large: Final = ThreadPoolExecutor(1, "large-bodies")


async def work_on_body(size: int, work: Callable[[], T]) -> T:
    """Return what `work` gives, which is about a body of `size` bytes.

    Cancelled, it leaves out what has not begun; what has runs to its end for nobody.
    """
    if size <= SMALL_BYTES_MAX:
        return work()
    thread = _middle if size <= MIDDLE_BYTES_MAX else _large
    return await asyncio.get_running_loop().run_in_executor(thread, work)
