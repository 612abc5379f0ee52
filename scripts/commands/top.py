"""Shows what a running server does, once a second: workers, cache, last requests, sessions.

    hearth top --base-url http://127.0.0.1:4000 [--key K]      until Ctrl-C
    hearth top --once                                          prints and ends

Works over ssh, in 80 columns (in fewer it tells less) and without colour (NO_COLOR). Where its
output is no terminal it prints once. A server that goes is shown as it was until it comes back.
Exit status 0: it was shown; 2: with --once, something was not told.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console
from rich.live import Live

from hearth.commands.server_client import ProbeError, Row, Server, parser_of, run, server_of
from hearth.commands.top_view import WIDTH_MIN, Limits, Snapshot, limits_in, view

EVERY_S: Final = 1.0
WAIT_S_MAX: Final = 10.0  # for an answer; a worker's own is given up after 5 s
PATHS: Final = {"health": "/health", "cache": "/v1/cache", "sessions": "/v1/sessions"}


class Watch:
    """Asks one server again and again, and remembers what it told last."""

    def __init__(self, server: Server, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._told_at = dict.fromkeys(PATHS, clock())
        self._last = Snapshot(server.base_url)

    async def look(self) -> Snapshot:
        """Return what the server tells now; for what it does not, what it told last, and why."""
        answers = await asyncio.gather(*(self._ask(path) for path in PATHS.values()))
        told = dict(zip(PATHS, answers, strict=True))
        now = self._clock()
        fresh = {name: body for name, body in told.items() if isinstance(body, dict)}
        self._told_at |= dict.fromkeys(fresh, now)
        problem = next((body for body in answers if isinstance(body, str)), "")
        age_s = now - min(self._told_at.values())
        last = self._last
        self._last = Snapshot(
            last.url,
            fresh.get("health", last.health),
            fresh.get("cache", last.cache),
            fresh.get("sessions", last.sessions),
            problem,
            age_s,
        )
        return self._last

    async def _ask(self, path: str) -> Row | str:
        """Return what the path is answered with, or why it is not."""
        try:
            body = await self._server.get(path)
        except ProbeError as error:
            return str(error)
        return body if isinstance(body, dict) else f"{path} is answered by something else."


async def show(watch: Watch, console: Console) -> None:
    """Show what the server tells on the whole terminal, until cancelled."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            snapshot = await watch.look()
            limits = limits_in(console.height, snapshot, console.width)
            live.update(view(snapshot, limits), refresh=True)
            await asyncio.sleep(EVERY_S)


async def top(options: argparse.Namespace) -> int:
    console = Console()
    async with server_of(options) as server:
        watch = Watch(server)
        if options.once or not console.is_terminal:
            snapshot = await watch.look()
            console.print(view(snapshot, Limits(is_narrow=console.width < WIDTH_MIN)))
            return 2 if snapshot.problem else 0
        showing = asyncio.create_task(show(watch, console))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, showing.cancel)
        await asyncio.wait((showing,))
        if not showing.cancelled():
            showing.result()  # it ends by a bug only: raise that
    return 0


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("top", __doc__)
    parser.add_argument("--once", action="store_true", help="print and end")
    parser.set_defaults(timeout=WAIT_S_MAX)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return run(top(options_of(arguments)))


if __name__ == "__main__":
    sys.exit(main())
