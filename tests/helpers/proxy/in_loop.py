"""Lets a test be a coroutine: it has an event loop of its own, and so many seconds."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

WAIT_S_MAX = 180.0


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**given), WAIT_S_MAX))

    return run
