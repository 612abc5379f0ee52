"""Ends a run in order on Ctrl-C, SIGTERM and a closed terminal, whatever it is doing."""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any, Final, NoReturn, TypeVar

SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)

Returned = TypeVar("Returned")


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Have SIGNALS raise KeyboardInterrupt for the length of the block, as Ctrl-C does.

    What is ignored stays so: `nohup` has a run outlive its terminal.
    """
    before = {number: signal.getsignal(number) for number in _heeded()}
    for number in before:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_interruptible(coroutine: Coroutine[Any, Any, Returned]) -> Returned:
    """Run it as `asyncio.run` does; SIGNALS cancel it, so that it ends the servers it started.

    Raises:
        KeyboardInterrupt: it was cancelled so.
    """
    before = {number: signal.getsignal(number) for number in _heeded()}
    try:
        return asyncio.run(_cancelled_by(coroutine, list(before)))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:  # the loop leaves the system's own handlers, which end a process at once
        for number, handler in before.items():
            signal.signal(number, handler)


async def _cancelled_by(
    coroutine: Coroutine[Any, Any, Returned], numbers: list[signal.Signals]
) -> Returned:
    task = asyncio.ensure_future(coroutine)
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


def _heeded() -> list[signal.Signals]:
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
