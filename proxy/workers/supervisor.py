"""Starts the workers, watches them, restarts them, and ends them.

A worker ends itself at the end of its standard input, which comes however this process dies. The
supervisor kills a worker that hangs.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from hearth.proxy.pool.worker_link import WorkerLink, link_health_fields
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.model_names import ServedModel
from hearth.shared.errors import EXIT_CANNOT_START, EXIT_RANK_LOST, EXIT_STUCK
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.stop_signals import CHUNK_WAIT_S, END_WAIT_S, SAY_AFTER_S
from hearth.shared.suspects import Suspect, SuspectStore, running_path, take_running
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Heartbeat
from hearth.shared.worker_files import reason_path, remove_claims, take_reason, weights_path
from hearth.shared.zmq_transport import SILENCE_S_MAX, ipc_endpoint

log = logging.getLogger(__name__)

# -P: Python must not import modules from the directory where the server was started.
WORKER_COMMAND: Final = (sys.executable, "-P", "-m", "hearth.worker.main")
WATCH_S: Final = 1.0
START_SILENCE_S_MAX: Final = 120.0  # time to the first heartbeat: MLX may come from a cold disk
BACKOFF_S_MAX: Final = 30.0
KILL_WAIT_S: Final = 1.0

ON_PURPOSE: Final = (0, EXIT_CANNOT_START, EXIT_STUCK, -signal.SIGTERM)  # no request's fault
SERVER_ENDED: Final = "the whole server ended"

WorkerState = Literal["loading", "ready", "dead", "restarting", "unloading", "unloaded"]

COMPUTES_SHARE: Final = 0.1  # CPU time / wall time of a busy worker; heartbeats take 0.003
SLOWER_MAX: Final = 10  # factor for a deep prompt and for other programs
UNMEASURED_MAX: Final = 10  # factor on STALL_SECONDS, for a step of unknown speed


class HangDetector:
    """Measures how long one process of a worker has made no step. Owner: the event loop.

    It counts only the seconds in which the supervisor watched.
    Invariant: `stalled_s` is 0 while the worker loads, holds no request, or has just made a step.
    """

    def __init__(self) -> None:
        self.stalled_s = 0.0
        self._steps = -1
        self._computed_to_s = 0.0  # `stalled_s` when the worker last used the CPU
        self._computed_cpu_s = 0.0  # the worker's CPU seconds at that time
        self._beat: Heartbeat | None = None

    def tick(self, beat: Heartbeat | None, elapsed_s: float) -> float:
        """Take in the latest heartbeat, `elapsed_s` after the previous tick; return `stalled_s`."""
        assert elapsed_s >= 0, elapsed_s
        self._beat = beat
        if beat is None or beat.state != "ready" or not beat.running + beat.waiting:
            self._reset(-1, 0.0)
        elif beat.steps != self._steps:
            self._reset(beat.steps, beat.cpu_s)
        else:
            self.stalled_s += elapsed_s
            waited_s = self.stalled_s - self._computed_to_s
            if beat.cpu_s - self._computed_cpu_s > COMPUTES_SHARE * waited_s:
                self._computed_to_s, self._computed_cpu_s = self.stalled_s, beat.cpu_s
        return self.stalled_s

    def _reset(self, steps: int, cpu_s: float) -> None:
        self.stalled_s, self._steps = 0.0, steps
        self._computed_to_s, self._computed_cpu_s = 0.0, cpu_s

    def hangs(self, stall_s: float) -> bool:
        """Return whether the worker has computed nothing for `stall_s`."""
        return self.stalled_s - self._computed_to_s >= stall_s

    def slowness(self, stall_s: float) -> str:
        """Return why a step that computes has taken too long; "" if it may go on or hangs."""
        beat = self._beat
        if beat is None or self.stalled_s < stall_s or self.hangs(stall_s):
            return ""
        speed, tokens = beat.prefill_tokens_per_s, beat.reading_tokens
        limit_s = UNMEASURED_MAX * stall_s
        known = f"{UNMEASURED_MAX} times STALL_SECONDS, as its speed is not known"
        if speed and tokens:
            limit_s = max(stall_s, SLOWER_MAX * tokens / speed)
            known = f"{SLOWER_MAX} times what {tokens:,} tokens take at the {speed:.3g} tokens/s "
            known += "that were measured, and STALL_SECONDS at least"
        if self.stalled_s < limit_s:
            return ""
        return (
            f"one step computed for {self.stalled_s:.0f} s, and the limit is {limit_s:.0f} s "
            f"({known}); set a smaller PREFILL_CHUNK or a larger STALL_SECONDS, or use a smaller "
            "model"
        )


@dataclass(frozen=True, slots=True)
class RestartRules:
    """The settings that the supervisor acts by."""

    model: ServedModel = ServedModel("")  # the first model of every worker
    flush_s: float = 0.0  # time for an ending worker to write its cache to disk
    stall_s: float = 0.0  # time without a step until the worker is killed; 0 = never
    chunk_wait_s: float = CHUNK_WAIT_S  # time for an ending worker to finish its chunk
    kind: str = "worker"  # the workers' name in the log

    @property
    def end_wait_s(self) -> float:
        """Return how long an ending worker may take before it is killed."""
        return self.chunk_wait_s + self.flush_s + END_WAIT_S


@dataclass(slots=True)
class WorkerProcess:
    """One worker, across the restarts of its process. Owner: the event loop.

    Invariant: it has at most one process at a time; `link` is set from the process's start until
    its end is handled.
    """

    worker_id: int
    socket_path: Path
    endpoint: str
    model: ServedModel  # model that the worker has, is loading, or had last
    process: Process | None = None
    cleared_process: Process | None = None  # process whose group was killed
    link: WorkerLink | None = None
    starts: int = 0
    restarts: int = 0
    kills: int = 0  # kills of hung processes
    early_deaths: int = 0  # deaths before "ready", in a row
    suspects: int = 0  # requests that were running when a process died
    hang_detector: HangDetector = field(default_factory=HangDetector)
    killed_for: str = ""  # why the supervisor killed this process
    is_leaving: bool = False  # the process is ending, for another model or for none
    is_asked: bool = False  # the process was started for a request, not after a death
    wanted: asyncio.Event = field(default_factory=asyncio.Event)  # clear: the worker stays empty
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # set: start without back-off

    def __post_init__(self) -> None:
        self.wanted.set()

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process and self.process.returncode is None else None

    @property
    def state(self) -> WorkerState:
        if self.is_leaving:
            return "unloading"
        if not self.wanted.is_set():
            return "unloaded"
        if self.pid is None:
            if self.is_asked:
                return "loading"
            return "dead" if self.process is None else "restarting"
        return "ready" if self.link is not None and self.link.is_ready else "loading"

    @property
    def is_silent(self) -> bool:
        """Return whether heartbeats are overdue, so that the worker counts as hung."""
        link = self.link if self.pid is not None else None
        limit_s = SILENCE_S_MAX if link and link.heartbeat else START_SILENCE_S_MAX
        return link is not None and link.silence_s > limit_s

    @property
    def is_failing(self) -> bool:
        """Return whether it died while loading, and waits before the next try."""
        return self.pid is None and self.early_deaths > 0

    def kill(self, signal_number: int) -> None:
        """Send the signal to the worker's process group."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS, for zombies
                os.killpg(self.pid, signal_number)

    def kill_left(self) -> None:
        """Kill the process group of an ended process: a stopped rank would live on.

        This is done once for a process, since its pid may be reused later.
        """
        process = self.process
        if (
            process is not None
            and process.returncode is not None
            and process is not self.cleared_process
        ):
            self.cleared_process = process
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left
                os.killpg(process.pid, signal.SIGKILL)

    def remove_files(self) -> None:
        """Remove the worker's socket and the files beside it."""
        path = self.socket_path
        for file in (path, reason_path(path), weights_path(path), running_path(path)):
            file.unlink(missing_ok=True)

    def health_fields(self) -> dict[str, Any]:
        """Return this worker's entry in /health."""
        return {
            "id": self.worker_id,
            "state": self.state,
            "pid": self.pid,
            "restarts": self.restarts,
            "kills": self.kills,
            "suspects": self.suspects,
            **link_health_fields(self.link, self.model.name),
        }


class Supervisor:
    """Keeps `count` workers running. Owner: the event loop.

    Invariant: a worker's next process starts only after the end of the previous one is handled.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        directory: Path,
        pool: WorkerPool,
        environ: Mapping[str, str],
        rules: RestartRules = RestartRules(),
    ) -> None:
        """`--worker-id` and `--endpoint` are appended to `command`. Sockets lie in `directory`.

        Raises:
            StartError: the path of a socket in `directory` is too long.
        """
        self._command = tuple(command)
        self._directory = directory
        self._pool = pool
        self.environ = dict(environ)
        self._rules = rules
        self._stopping = False
        # The server goes on after a failed load: a worker was ready before, or one stays empty.
        self._outlives_loads = False
        self._tasks: list[asyncio.Task[None]] = []
        self._endings: set[asyncio.Task[None]] = set()  # ends of workers that change their model
        self.cannot_start = asyncio.Event()  # a worker reported that a restart would not help
        self.suspects: SuspectStore | None = None  # requests that ran when workers died
        self.on_change: Callable[[], None] = lambda: None  # called when a worker's pid changes
        # Called when a worker died while loading; returns whether the worker got another model.
        self.on_early_death: Callable[[WorkerProcess, str], bool] = lambda _worker, _reason: False
        paths = [directory / f"worker-{index}.sock" for index in range(count)]
        self.workers = [
            WorkerProcess(index, path, ipc_endpoint(path), rules.model)
            for index, path in enumerate(paths)
        ]

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self.workers if worker.pid is not None]

    async def start(self) -> None:
        """Start every worker; return as soon as their processes exist."""
        remove_claims(self._directory)  # files of a dead server, perhaps with more workers
        for worker in self.workers:
            self._suspect(worker, SERVER_ENDED)
            if worker.wanted.is_set():
                await self._spawn(worker)
        self._tasks = [asyncio.create_task(self._run_worker(worker)) for worker in self.workers]
        self._tasks.append(asyncio.create_task(self._watch()))

    async def _spawn(self, worker: WorkerProcess) -> None:
        assert worker.pid is None and worker.link is None, (worker.worker_id, worker.pid)
        worker.remove_files()  # otherwise the new link would connect to the dead worker's socket
        worker.hang_detector, worker.killed_for = HangDetector(), ""
        worker.process = await asyncio.create_subprocess_exec(
            *self._command,
            "--worker-id",
            str(worker.worker_id),
            "--endpoint",
            worker.endpoint,
            stdin=PIPE,  # held open for as long as this process lives
            cwd=PROJECT_DIR,
            env=self.environ | worker.model.environ,
            start_new_session=True,  # Ctrl-C must reach this process alone
        )
        worker.link = self._pool.connect(worker.worker_id, worker.endpoint)
        worker.starts += 1
        log.info("%s started id=%d pid=%d", self._rules.kind, worker.worker_id, worker.process.pid)
        self.on_change()

    async def _run_worker(self, worker: WorkerProcess) -> None:
        while True:
            if worker.process is not None:  # otherwise the worker is empty from the start
                code = await worker.process.wait()
                worker.kill_left()
                if self._stopping:
                    return
                if worker.is_leaving:
                    # The process ended on request; `_end` waits for it too, and logs how it ended.
                    assert worker.link is None, worker.worker_id
                    log.info("%s ended id=%d", self._rules.kind, worker.worker_id)
                    worker.is_leaving = False
                    self.on_change()
                else:
                    self._record_death(worker, code)
                    if code == EXIT_CANNOT_START and not self._outlives_loads:
                        self.cannot_start.set()
                        return
            await worker.wanted.wait()
            await self._respawn(worker)

    async def _respawn(self, worker: WorkerProcess) -> None:
        """Start `worker` again after its back-off; retry until the system can start a process."""
        while True:
            worker.moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s(worker.early_deaths)):
                    await worker.moved.wait()
            try:
                await self._spawn(worker)
            except OSError as error:
                worker.early_deaths += 1
                log.error("worker cannot be started id=%d: %s", worker.worker_id, error)
            else:
                return

    def leave_empty(self, worker: WorkerProcess) -> None:
        """Keep `worker`, which has no serving process, empty until `move` gives it a model.

        From then on a model that cannot be loaded does not end this server.
        """
        worker.wanted.clear()
        self._outlives_loads = True

    def move(self, worker: WorkerProcess, model: ServedModel | None) -> None:
        """Restart `worker` with `model`; None = unload its model and keep it empty.

        The worker must hold no request, and writes its cache to disk before its end.
        """
        assert worker.link is None or not worker.link.answers, worker.worker_id
        worker.early_deaths, worker.is_asked = 0, True
        worker.moved.set()
        if model is None:
            worker.wanted.clear()
        else:
            worker.model = model
            worker.wanted.set()
        if worker.pid is None:
            return  # no process to end: `_run_worker` waits to start the next one
        worker.is_leaving = True
        self._outlives_loads |= worker.link is not None and worker.link.is_ready
        self._pool.disconnect(worker.worker_id, "The worker gets another model; ask again.")
        worker.link = None
        ending = asyncio.create_task(self._end(worker), name=f"end {worker.worker_id}")
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    def _record_death(self, worker: WorkerProcess, code: int) -> None:
        assert worker.link is not None
        was_ready = worker.link.heartbeat is not None and worker.link.heartbeat.state == "ready"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        how += f": {worker.killed_for}" if worker.killed_for else ""
        if code == EXIT_RANK_LOST:
            how = take_reason(worker.socket_path) or how
        log.error(
            "%s died id=%d how=%s requests=%d",
            self._rules.kind,
            worker.worker_id,
            how,
            worker.link.load,
        )
        is_proof = code != EXIT_RANK_LOST  # a cable may have been pulled
        suspects = self._suspect(worker, how, is_proof=is_proof) if code not in ON_PURPOSE else {}
        self._fail_requests(worker, how, suspects)
        worker.link = None
        worker.restarts += 1
        self._outlives_loads |= was_ready
        self._count_death(worker, how, was_ready=was_ready)
        self._pool.wake()  # waiting requests may go to another worker
        self.on_change()

    def _suspect(
        self, worker: WorkerProcess, how: str, *, is_proof: bool = True
    ) -> dict[str, Suspect]:
        """Record the requests that ran when a process died; return each as a suspect, by id.

        Call it once for a process.
        """
        running = take_running(worker.socket_path)
        worker.suspects += len(running)
        store = self.suspects
        return {} if store is None else store.record_death(running, how, is_proof=is_proof)

    def _fail_requests(
        self, worker: WorkerProcess, how: str, suspects: Mapping[str, Suspect]
    ) -> None:
        text = (
            f"The worker that held this request died ({how}) and is being restarted; "
            "send the request again."
        )
        errors = {request_id: suspect.error(text) for request_id, suspect in suspects.items()}
        self._pool.disconnect(worker.worker_id, text, errors=errors)

    def _count_death(self, worker: WorkerProcess, how: str, *, was_ready: bool) -> None:
        """Count a death while loading, and set the error for requests until the worker is back."""
        reason = take_reason(worker.socket_path) or f"its worker died while it loaded ({how})."
        if not was_ready and self.on_early_death(worker, reason):
            worker.early_deaths = 0
            return
        worker.is_asked = False
        worker.early_deaths = 0 if was_ready else worker.early_deaths + 1
        self._pool.unavailable_reason = ""
        if worker.early_deaths > 1:
            self._pool.unavailable_reason = (
                f"No worker is ready: worker {worker.worker_id} died {worker.early_deaths} times "
                f"while it was loading: {reason} The server's log says more."
            )

    async def _watch(self) -> None:
        while True:
            before = awake_s()
            await asyncio.sleep(WATCH_S)
            elapsed_s = awake_s() - before
            if elapsed_s <= 2 * WATCH_S:  # otherwise this process itself was suspended
                for worker in self.workers:
                    self._check(worker, elapsed_s)

    def _check(self, worker: WorkerProcess, elapsed_s: float) -> None:
        """Kill `worker` if it is stuck: it sends no heartbeat, or makes no step.

        A step that uses the CPU may take longer, and killing it proves nothing against a request.
        The requests fail at once: a process that hangs in a driver may take long to end.
        """
        if worker.link is None or worker.killed_for:
            return
        detector, stall_s = worker.hang_detector, self._rules.stall_s
        stalled_s = detector.tick(worker.link.heartbeat, elapsed_s)
        slowness = detector.slowness(stall_s) if stall_s else ""
        is_proof = not (worker.is_silent or slowness)
        if worker.is_silent:
            worker.killed_for = "it was silent"
        elif stall_s and detector.hangs(stall_s):
            worker.killed_for = f"it held requests and made no step for {stalled_s:.0f} s"
        elif slowness:
            worker.killed_for = slowness
        else:
            return
        log.error(
            "%s killed id=%d requests=%d: %s",
            self._rules.kind,
            worker.worker_id,
            worker.link.load,
            worker.killed_for,
        )
        worker.kills += 1
        worker.kill(signal.SIGKILL)
        how = f"SIGKILL: {worker.killed_for}"
        self._fail_requests(worker, how, self._suspect(worker, how, is_proof=is_proof))

    async def stop(self) -> None:
        """End every worker by SIGTERM, a hung one by SIGKILL, and remove the sockets."""
        self._stopping = True
        for task in (tasks := [*self._tasks, *self._endings]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        hint = "; a second Ctrl-C kills it at once"
        await asyncio.gather(*(self._end(worker, hint) for worker in self.workers))
        self.remove_sockets()

    async def _end(self, worker: WorkerProcess, hint: str = "") -> None:
        """Let `worker` end its chunk, write its cache to disk and exit; kill it if it hangs.

        `hint` is appended to the log line while it takes long.
        """
        if worker.process is None:
            return
        began, rules = awake_s(), self._rules
        worker.kill(signal.SIGTERM)
        if not await _ends(worker.process, SAY_AFTER_S):
            log.warning(
                "waiting for worker %d to end its chunk (up to %g s)%s",
                worker.worker_id,
                rules.chunk_wait_s,
                hint,
            )
        if not await _ends(worker.process, rules.end_wait_s - (awake_s() - began)):
            worker.killed_for = f"it was told to end and did not in {rules.end_wait_s:g} s"
            worker.kill(signal.SIGKILL)
            await _ends(worker.process, KILL_WAIT_S)  # a process stuck in a driver ends later
        elif worker.process.returncode == EXIT_STUCK:
            worker.killed_for = "its chunk did not end"
        else:
            worker.kill_left()
            return
        worker.kill_left()
        worker.kills += 1
        log.error(
            "%s killed id=%d: %s (waited %g s for its chunk, %g s for the disk, %g s to end)",
            rules.kind,
            worker.worker_id,
            worker.killed_for,
            rules.chunk_wait_s,
            rules.flush_s,
            END_WAIT_S,
        )

    def kill_all(self) -> None:
        """Kill every worker without waiting. Safe in a signal handler."""
        for worker in self.workers:
            worker.kill(signal.SIGKILL)

    def remove_sockets(self) -> None:
        for worker in self.workers:
            worker.remove_files()
        for path in self._directory.glob("ranks-*.sock"):
            path.unlink(missing_ok=True)


async def _ends(process: Process, wait_s: float) -> bool:
    """Wait at most `wait_s` for `process` to end; return whether it has ended."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, wait_s)):
            await process.wait()
    return process.returncode is not None


def backoff_s(early_deaths: int) -> float:
    """Return 0 after a death in service, else 1, 2, 4 ... BACKOFF_S_MAX."""
    return min(2.0 ** (early_deaths - 1), BACKOFF_S_MAX) if early_deaths else 0.0
