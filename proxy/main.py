"""Runs the server for `hearth serve`: starts the workers and serves HTTP until a signal."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Final, NoReturn

import uvicorn

from hearth.proxy.app import ProxyApp
from hearth.proxy.embeddings.encoders import make_encoders
from hearth.proxy.gateway.gateway import make_gateway
from hearth.proxy.gateway.routing_table import read_table
from hearth.proxy.http.event_loop import SuspendingEventLoop
from hearth.proxy.http.http1_protocol import ConnectionSlots, Http1Protocol, slots_within
from hearth.proxy.http.origin_rules import OriginRules
from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.proxy.pool.worker_pool import LOAD_GAP_MAX, CacheAffinity, WorkerPool
from hearth.proxy.request.model_names import models_of, sources_of
from hearth.proxy.startup_banner import ready_lines, starting_line
from hearth.proxy.workers.model_swap import ModelSwapper
from hearth.proxy.workers.pid_file import PidFile
from hearth.proxy.workers.remote_workers import RemoteWorkers
from hearth.proxy.workers.supervisor import WORKER_COMMAND, RestartRules, Supervisor
from hearth.shared import logging_setup as logs
from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.shared.linux_environment import (
    malloc_environment,
    map_large_blocks,
    openblas_environment,
)
from hearth.shared.listen_addresses import listen_addresses
from hearth.shared.macos_network_hints import listening_hint
from hearth.shared.models.model_path import why_missing
from hearth.shared.paths import env_file
from hearth.shared.private_files import own_run_directory
from hearth.shared.process_start import (
    open_files_max,
    raise_open_file_limit,
    shorten_switch_interval,
)
from hearth.shared.settings import Settings, load_settings, setting_warnings, variables_in
from hearth.shared.stop_signals import FLUSH_WAIT_S, StopSignals
from hearth.shared.suspects import DIRECTORY, SuspectStore
from hearth.shared.version import VERSION

log = logging.getLogger("hearth.proxy.main")  # with -m, __name__ would be __main__

GRACE_S: Final = 2  # time for streams to send their last event after a signal
KEEP_ALIVE_S: Final = 120  # agents think for longer than uvicorn's default of 5 s
BACKLOG: Final = 512
OPEN_FILES: Final = 4096  # two for each connection, and some spare; macOS allows 256 by default
OPEN_FILES_MIN: Final = 256  # the server without clients has a hundred files open


class _Server(uvicorn.Server):
    """Runs uvicorn without its signal handlers: ours end the workers too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Hearth:
    """Builds and runs the whole server: sockets, workers, HTTP. Owner: the event loop."""

    def __init__(
        self, settings: Settings, environ: Mapping[str, str], worker_command: Sequence[str]
    ) -> None:
        """Raises: StartError: the port is taken, or a directory, socket or file is unusable."""
        self._settings = settings
        self._directory = own_run_directory(settings.run_dir, settings.proxy_port)
        # Raises now if CORS_ORIGINS or ALLOWED_HOSTS is malformed.
        OriginRules(settings.proxy_host, settings.cors_origins, settings.allowed_hosts)
        path = settings.litellm_config
        table = (
            None if path is None else read_table(path, settings, environ, variables_in(env_file()))
        )
        models = models_of(settings)
        bounds = (LOAD_GAP_MAX, settings.live_slots_max, settings.max_concurrent_requests)
        self._pool = WorkerPool(CacheAffinity(min(filter(None, bounds))))
        environment = {
            **environ,
            **openblas_environment(environ),
            **malloc_environment(environ),
        }
        self._supervisor = Supervisor(
            worker_command,
            settings.workers,
            self._directory,
            self._pool,
            environment,
            RestartRules(models[0], FLUSH_WAIT_S, settings.stall_seconds),
        )
        self._encoders = make_encoders(settings, environment, self._pool)
        self._supervisor.suspects = SuspectStore(settings.kv_cache_dir / DIRECTORY)
        self._model_swapper = ModelSwapper(
            self._supervisor,
            self._pool,
            models,
            settings.model_idle_unload_seconds,
            lambda model: why_missing(model.path or settings.model_path),
        )
        self._remote = RemoteWorkers(settings, self._pool, models)
        self._routes = AdminRoutes(
            settings, VERSION, self._supervisor, self._pool, self._remote.workers
        )
        self._gateway = None if table is None else make_gateway(table, settings, self._routes)
        host, port, sources = settings.proxy_host, settings.proxy_port, sources_of(settings)
        self._pid_file = PidFile(self._directory, host, port, sources)
        for supervisor in self._supervisors:
            supervisor.on_change = self._write_pid_file
        self._sockets = bind_all(host, port)
        self._server: _Server | None = None
        self._stop = asyncio.Event()
        self._signals = StopSignals(self._stop.set, self._end_now)

    @property
    def variables_read(self) -> frozenset[str]:
        """Return the environment variables that the LiteLLM config refers to."""
        return frozenset() if self._gateway is None else self._gateway.table.variables

    @property
    def _supervisors(self) -> list[Supervisor]:
        return [self._supervisor, *([self._encoders.supervisor] if self._encoders else [])]

    def _write_pid_file(self) -> None:
        self._pid_file.write([pid for supervisor in self._supervisors for pid in supervisor.pids])

    async def run(self) -> int:
        """Serve until a signal, and return the exit code."""
        self._signals.listen(asyncio.get_running_loop())
        missing = self._model_swapper.missing_at_start
        print(starting_line(self._settings, VERSION, missing), flush=True)
        if hint := listening_hint(self._settings.proxy_host, os.path.realpath(sys.executable)):
            log.info("%s", hint)
        serving = asyncio.create_task(self._serve(), name="serve")
        stopping = asyncio.create_task(self._stop.wait())
        refused = asyncio.create_task(self._supervisor.cannot_start.wait())
        try:
            await asyncio.wait({serving, stopping, refused}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()  # uvicorn ended by itself: raises uvicorn's exception
        finally:
            await self._shut_down(serving)
        return EXIT_CANNOT_START if refused.done() else 0

    def _end_now(self, number: int) -> NoReturn:
        """Kill the workers and exit without waiting."""
        log.warning("%s again: workers are killed amid their work", signal.Signals(number).name)
        for supervisor in self._supervisors:
            supervisor.kill_all()
        self._remove_files()
        os._exit(128 + number)

    async def _serve(self) -> None:
        self._write_pid_file()
        for supervisor in self._supervisors:
            await supervisor.start()
        self._remote.start()
        slots = ConnectionSlots(slots_within(open_files_max(OPEN_FILES)))
        if self._gateway is not None:
            self._gateway.start()
        app = ProxyApp(
            *(self._settings, self._pool, self._routes, slots, self._gateway, self._encoders)
        )
        self._server = _Server(
            uvicorn.Config(
                app,
                http=partial(Http1Protocol, slots, app.refuse_unread),  # type: ignore[arg-type]
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        swapping = asyncio.create_task(self._swap_models(), name="model swapper")
        try:
            await self._server.serve(sockets=self._sockets)
        finally:
            swapping.cancel()
            app.keep_awake.close()

    async def _swap_models(self) -> None:
        """Print the ready lines as soon as clients can be answered, then run the model swapper."""
        assert self._server is not None
        missing = self._model_swapper.missing_at_start
        try:
            while not (
                self._server.started
                and (missing or self._pool.facts_of())
                and (missing or any(link.is_ready for link in self._pool.links.values()))
            ):
                await asyncio.sleep(0.02)
            for line in ready_lines(self._settings, self._pool.facts_of(), missing):
                print(line, flush=True)
            await self._model_swapper.run()
        except Exception:  # loaded models stay served
            log.exception("no model is loaded or unloaded any more")

    async def _shut_down(self, serving: asyncio.Task[None]) -> None:
        """End clients, workers and the server, in an order in which no part waits for another."""
        log.info("shutting down")
        self._remote.stop()
        self._routes.feed.close()
        self._pool.close()
        if self._gateway is not None:
            self._gateway.litellm.end_calls("The server is shutting down.")
        ending = [asyncio.create_task(self._supervisor.stop())]
        if self._encoders is not None:
            ending.append(asyncio.create_task(self._encoders.close()))
        if self._server is not None and self._server.started:
            self._server.should_exit = True
        else:
            serving.cancel()
        await asyncio.gather(serving, *ending, return_exceptions=True)
        if self._gateway is not None:
            await self._gateway.close()
        self._routes.stored.close()
        for listener in self._sockets:
            listener.close()
        self._remove_files()

    def _remove_files(self) -> None:
        self._supervisor.remove_sockets()
        self._pid_file.remove()


def bind_all(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of `host`.

    Raises:
        StartError: an address is not this machine's, or another program uses the port.
    """
    with contextlib.ExitStack() as bound:
        found = [bound.enter_context(bind(address, port)) for address in listen_addresses(host)]
        bound.pop_all()
    return found


def bind(address: str, port: int) -> socket.socket:
    """Return a listening socket bound to exactly this address.

    Raises:
        StartError: the address is not this machine's, or another program uses the port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((address, port))
        bound.listen(BACKLOG)  # two processes may bind one port on Linux; only one may listen
    except OSError as error:
        bound.close()
        setting, remedy = "PROXY_PORT", "Stop what uses it, or set PROXY_PORT."
        if error.errno == errno.EADDRNOTAVAIL:
            setting, remedy = "PROXY_HOST", "Set PROXY_HOST to an address of this machine."
        where = f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}"
        raise StartError(
            f"{setting}: {where} can not be listened on ({error.strerror}). {remedy}"
        ) from None
    return bound


def main(worker_command: Sequence[str] = WORKER_COMMAND) -> int:
    """Run the server; return its exit code."""
    environ = dict(os.environ)  # the environment at the start, which workers get
    map_large_blocks(environ)
    shorten_switch_interval()
    try:
        settings = load_settings(environ, env_file())
        logs.configure(settings.log_level.upper(), "proxy", settings.log_prompts)
        raise_open_file_limit(OPEN_FILES, OPEN_FILES_MIN)
        hearth = Hearth(settings, environ, worker_command)
        for text in setting_warnings(environ, env_file(), hearth.variables_read):
            log.warning("%s", text)
    except StartError as error:
        print(f"hearth: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    loop = SuspendingEventLoop()
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(hearth.run())


def end(code: int) -> NoReturn:
    """Exit without waiting for threads, whose work is no longer needed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main())
