"""Keeps one worker running for proxies on other machines, as the server does with its own.

The worker and its supervisor speak over a socket of this machine; the proxies reach the same worker
on tcp://. So a worker that is far from its proxy is watched, restarted and ended like any other.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Final, NoReturn

from hearth.proxy.http.event_loop import SuspendingEventLoop
from hearth.proxy.pool.worker_link import WorkerLink
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.model_names import models_of, sources_of
from hearth.proxy.workers.pid_file import PidFile
from hearth.proxy.workers.supervisor import WORKER_COMMAND, RestartRules, Supervisor
from hearth.shared import logging_setup as logs
from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.shared.linux_environment import malloc_environment, openblas_environment
from hearth.shared.macos_network_hints import listening_hint
from hearth.shared.paths import env_file
from hearth.shared.private_files import private_directory
from hearth.shared.settings import Settings, setting_warnings
from hearth.shared.stop_signals import FLUSH_WAIT_S, StopSignals
from hearth.shared.suspects import DIRECTORY, SuspectStore
from hearth.shared.version import VERSION
from hearth.shared.zmq_transport import PROXY_NAME, WORKER_NAME

log: Final = logging.getLogger(__name__)


class WorkerHost:
    """One worker that listens on `endpoint`, and its supervisor. Owner: the event loop."""

    def __init__(self, settings: Settings, endpoint: str, environ: Mapping[str, str]) -> None:
        """Raises: StartError: a directory, a socket's path or the model's name is of no use."""
        self._settings = settings
        self._endpoint = endpoint
        directory = private_directory(settings.instance_dir)
        pool = WorkerPool()
        pool.on_ready = self._tell_ready
        self._supervisor = Supervisor(
            (*WORKER_COMMAND, "--listen", endpoint),
            1,
            directory,
            pool,
            {**environ, **openblas_environment(environ), **malloc_environment(environ)},
            RestartRules(models_of(settings)[0], FLUSH_WAIT_S, settings.stall_seconds),
        )
        self._supervisor.suspects = SuspectStore(settings.kv_cache_dir / DIRECTORY)
        self._pool = pool
        host, port = endpoint.removeprefix("tcp://").rpartition(":")[::2]
        self._pid_file = PidFile(directory, host, int(port), sources_of(settings))
        self._supervisor.on_change = self._write_pid_file
        self._stop = asyncio.Event()
        self._signals = StopSignals(self._stop.set, self._end_now)

    async def run(self) -> int:
        """Keep the worker running until a signal; return the exit code."""
        self._signals.listen(asyncio.get_running_loop())
        for line in self._first_lines():
            print(line, flush=True)
        self._write_pid_file()
        stopping = asyncio.create_task(self._stop.wait())
        refused = asyncio.create_task(self._supervisor.cannot_start.wait())
        try:
            await self._supervisor.start()
            await asyncio.wait({stopping, refused}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            log.info("shutting down")
            await self._supervisor.stop()  # the worker tells its clients first
            self._pool.close()
            self._remove_files()
        return EXIT_CANNOT_START if refused.done() else 0

    def _first_lines(self) -> list[str]:
        settings, port = self._settings, self._endpoint.rpartition(":")[2]
        keys = settings.curve_keys_dir
        return [
            f"hearth {VERSION}: loading {settings.model_path} in a worker on {self._endpoint} ...",
            f"  keys     its own {keys / WORKER_NAME}.key_secret; it hears the proxy of "
            f"{keys / PROXY_NAME}.key alone",
            f"  proxy    WORKER_ENDPOINTS=tcp://ADDRESS:{port} there, with an address of this "
            "machine",
        ]

    def _tell_ready(self, link: WorkerLink) -> None:
        """Say what is served, and what it must be called where the proxy is."""
        facts = link.heartbeat.model if link.heartbeat is not None else None
        assert facts is not None, "ready"
        print(f"ready: {self._endpoint}", flush=True)
        print(f"  model    {facts.name}: MODEL_PATH and PROXY_MODEL_ID as here", flush=True)
        print(f"  context  {facts.context_tokens:,} tokens", flush=True)

    def _write_pid_file(self) -> None:
        self._pid_file.write(self._supervisor.pids)

    def _end_now(self, number: int) -> NoReturn:
        """End without waiting for a chunk, or for anything else."""
        log.warning("%s again: the worker is killed amid its work", signal.Signals(number).name)
        self._supervisor.kill_all()
        self._remove_files()
        os._exit(128 + number)

    def _remove_files(self) -> None:
        self._supervisor.remove_sockets()
        self._pid_file.remove()


def run(settings: Settings, endpoint: str) -> int:
    """Run a worker on `endpoint` with this process's variables; return the exit code."""
    environ = dict(os.environ)
    logs.configure(settings.log_level.upper(), "supervisor", settings.log_prompts)
    loop = SuspendingEventLoop()
    asyncio.set_event_loop(loop)
    try:
        host = WorkerHost(settings, endpoint, environ)
        for text in setting_warnings(environ, env_file()):
            log.warning("%s", text)
    except StartError as error:
        print(f"hearth worker: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    address = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if hint := listening_hint(address, os.path.realpath(sys.executable)):
        log.info("%s", hint)
    return loop.run_until_complete(host.run())
