"""Runs one worker process: `python -m hearth.worker.main`, started by a supervisor.

The supervisor belongs to the server or to `hearth worker`. A worker of `hearth worker` also listens
on tcp:// for proxies on other machines.

Threads: the main thread is the wire thread (socket, heartbeats); `inference` loads the model and is
the only thread that touches MLX; `prompt-0` to `prompt-2` render and tokenise; `image` reads image
files if the model takes images.
"""

import functools
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

from hearth.shared.errors import StartError
from hearth.shared.settings import Settings
from hearth.shared.wire_messages import Heartbeat, Status
from hearth.shared.zmq_transport import PROXY_NAME, WORKER_NAME, RouterPort, curve_keys
from hearth.worker.engine import mlx_lm_open_files  # noqa: F401  before any import of mlx_lm

# isort: split
from hearth.worker.cache_report import answer_status, correctness_counts
from hearth.worker.engine.engine import leave_device
from hearth.worker.serving_parts import ModelStart, ServingParts
from hearth.worker.setup.kv_setup import running_max
from hearth.worker.threads.shutdown import Shutdown
from hearth.worker.threads.start_worker import refuse_start, run_worker
from hearth.worker.threads.thread_queues import Inbox, InferenceTask, PromptLanes
from hearth.worker.threads.wire_thread import WireThread

log = logging.getLogger("hearth.worker")

QUEUE_NAMED_MAX: Final = 256  # most waiting requests that a heartbeat names


class Worker:
    """Starts and ends the threads of a worker; the docstring of each part names its owner.

    Invariant: `_served` is None until the model can be served; heartbeats say "loading" until then.
    """

    def __init__(
        self, settings: Settings, worker_id: int, endpoint: str, listens_on: str = ""
    ) -> None:
        """Bind the supervisor's `endpoint`, and the tcp:// endpoint `listens_on` if given.

        Raises:
            StartError: an endpoint cannot be bound, or the CURVE keys are missing.
        """
        self._settings = settings
        self._worker_id = worker_id
        self._endpoint = endpoint
        self._jobs = PromptLanes()
        self._inbox: Inbox = queue.SimpleQueue()
        self._start: ModelStart | None = None
        self._served: ServingParts | None = None
        self._port = RouterPort(endpoint)
        if listens_on:
            keys = curve_keys(settings.curve_keys_dir, WORKER_NAME, PROXY_NAME)
            self._port.listen(listens_on, keys)
        self._shutdown = Shutdown(self._port.wake)
        self._wire = WireThread(
            self._port,
            worker_id,
            self._jobs,
            self._heartbeat,
            # A preliminary limit, until the model is known:
            open_max=running_max(settings, is_batched=True) + settings.queue_max,
        )

    def run(self) -> int:
        """Work until SIGTERM or until the supervisor is gone; return the exit code."""
        shutdown = self._shutdown
        shutdown.listen()
        inference = shutdown.start_thread("inference", self._inference)
        with shutdown.guard("wire"):
            self._wire.run(shutdown.is_begun)
        shutdown.begin()
        self._jobs.put(None)
        is_over = threading.Event()
        end = functools.partial(self._end, inference, is_over)
        ending = shutdown.start_thread("end", end)
        with shutdown.guard("wire"):  # heartbeats go on, since a silent worker is killed
            self._wire.end_requests(sends_failures=not shutdown.exit_code)
            self._wire.run(is_over.is_set)
        ending.join()
        self._port.close()
        return shutdown.exit_code

    def _end(self, inference: threading.Thread, is_over: threading.Event) -> None:
        """Wait for the chunk in flight, then write sessions and KV to disk."""
        try:
            self._shutdown.wait_for(inference)
            if self._start is not None and not self._shutdown.exit_code:
                self._start.write()
                if not inference.is_alive():
                    self._start.rank.end()
            self._shutdown.record_end(inference)
        finally:
            is_over.set()
            self._port.wake()

    def _inference(self) -> None:
        """Load and serve the model until the worker ends; always leave the device at the end."""
        with self._shutdown.guard("inference"):
            start = self._start = ModelStart(
                self._settings,
                self._worker_id,
                self._endpoint,
                self._shutdown,
                self._wire,
                self._jobs,
                self._inbox,
            )
            try:
                self._serve(start)
            except StartError as error:
                self._shutdown.begin(refuse_start(self._endpoint, error))
            except Exception:
                start.rank.wait_for_rank_failure()
                raise
        leave_device()
        if self._start is not None:
            self._start.release_memory_share()

    def _serve(self, start: ModelStart) -> None:
        """Make the parts that serve the model, and compute until the worker ends."""
        parts = start.make()
        with parts.engine.stream():
            self._wire.run_in_inference = functools.partial(self._answer_in_inference, parts)
            self._served = parts
            facts = parts.loaded.facts
            counts = correctness_counts(parts.kv_manager, parts.sessions)
            log.info(
                "ready model=%s layout=%s %s %s",
                facts.name,
                facts.cache_layout,
                start.steps.end(),
                " ".join(f"{name}={count}" for name, count in counts.items()),
            )
            while not self._shutdown.is_begun():
                parts.loop.run_once()
            parts.scheduler.leave_forwards()
            if not self._shutdown.exit_code:
                parts.kv_manager.queue_unwritten()

    def _answer_in_inference(self, parts: ServingParts, message: Status) -> None:
        """Queue a Status for the inference thread, which also sends the answer."""
        answer = functools.partial(answer_status, parts, message, self._port.outbox)
        self._inbox.put(InferenceTask(answer))

    def _heartbeat(self, arriving: Sequence[str]) -> Heartbeat:
        parts, start = self._served, self._start
        if parts is None:
            idle = Heartbeat("loading", 0, 0, 0, 0, None)
            return idle if start is None else start.steps.heartbeat()
        load = parts.scheduler.load(len(arriving))
        queue, facts, pace = [*load.queue, *arriving], parts.loaded.facts, parts.scheduler.pace
        is_cpu = facts.backend == "cpu" and facts.ranks == 1  # ranks wait in busy loops
        return Heartbeat(
            "ready",
            load.running,
            len(queue),
            parts.scheduler.steps,
            parts.loop.active_bytes,
            facts,
            load.wait_s,
            queue[:QUEUE_NAMED_MAX],
            cpu_s=time.process_time() if is_cpu else 0.0,
            prefill_tokens_per_s=pace.measured_tokens_per_s,
            reading_tokens=pace.reading_tokens,
        )


def main() -> int:
    return run_worker(
        "hearth.worker.main",
        __doc__,
        "worker",
        lambda settings, options: Worker(
            settings, options.worker_id, options.endpoint, options.listen
        ),
    )


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads that use MLX must not outlive the interpreter
