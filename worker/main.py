"""Runs one worker process: `python -m hearth.worker.main`, started by the proxy's supervisor.

With an endpoint on tcp:// it is started by hand, for a proxy on another machine.

Threads: this one is the mailbox (socket, heartbeats); `inference` loads the model and is the only
one that touches MLX; `prompt` renders and tokenises; `image`, where the model takes images, reads
their files.
"""

import argparse
import functools
import logging
import os
import queue
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.shared.load_settings import Settings, load_settings
from hearth.shared.logging_setup import configure
from hearth.shared.paths import env_file
from hearth.shared.start_failure import leave_reason
from hearth.shared.wire_messages import Failed, Heartbeat, Status, Told
from hearth.shared.zmq_transport import PROXY_NAME, WORKER_NAME, CurveKeys, RouterPort, curve_keys
from hearth.worker.cache_report import cache_report, vision_report
from hearth.worker.engine.engine import Engine, default_chunk
from hearth.worker.engine.mlx_memory import held_bytes, hold_memory, memory_limit, room_in
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.engine.sampler import TokenChoice, make_token_choice
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.kv.null_kv_manager import NullKVManager
from hearth.worker.prompt.prefill_cuts import CutRule
from hearth.worker.prompt.template_turn_tokens import end_of_turn_ids, turn_marks
from hearth.worker.schedule.generation_watchdog import GenerationWatchdog
from hearth.worker.schedule.memory_guard import MemoryGuard, Watermark
from hearth.worker.schedule.progress_log import StartSteps
from hearth.worker.schedule.request_state import ClientLease, Request
from hearth.worker.schedule.scheduler import Scheduler
from hearth.worker.schedule.scheduler_interfaces import SchedulerRules
from hearth.worker.schedule.turn_recorder import TurnRecorder
from hearth.worker.sessions.session_manager import SessionManager
from hearth.worker.setup.kv_setup import cache_root, is_exact, make_kv_manager
from hearth.worker.setup.prompt_setup import (
    make_builder,
    make_sessions,
    prompt_facts,
    turns_directory,
)
from hearth.worker.setup.vision_setup import VisionParts, forwarded_at_once, make_vision, told
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.threads.image_thread import ImageThread, UnreadJobs
from hearth.worker.threads.inference_thread import Inbox, InferenceTask, InferenceThread
from hearth.worker.threads.prompt_thread import Look, PromptThread
from hearth.worker.threads.wire_thread import Jobs, WireThread, WorkerIdentity

log = logging.getLogger("hearth.worker")

EXIT_BROKEN = 70  # EX_SOFTWARE: a bug, or a fault of the device; a clean start may help
QUEUE_TOLD_MAX = 256  # waiting requests that a heartbeat names
STOP_WAIT_S = 1.0  # for a chunk in flight; the supervisor kills after 2


class Worker:
    """Wires the threads together; each part says in its own docstring who owns it."""

    def __init__(self, settings: Settings, worker_id: int, endpoint: str) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._endpoint = endpoint
        self._jobs: Jobs = queue.SimpleQueue()
        self._inbox: Inbox = queue.SimpleQueue()
        self._stop = threading.Event()
        self._exit_code = 0
        self._scheduler: Scheduler | None = None  # set once the model is loaded
        self._sessions: SessionManager | None = None
        self._loop: InferenceThread | None = None
        self._keeper: KVManager | NullKVManager | None = None
        self._loaded: LoadedModel | None = None
        self._is_on_network = endpoint.startswith("tcp://")  # started by hand, for another machine
        self._port = RouterPort(endpoint, _keys(settings, endpoint))
        self._mailbox = WireThread(
            self._port,
            WorkerIdentity(worker_id, secrets.token_hex(8)),
            self._jobs,
            self._heartbeat,
            open_max=settings.live_slots_max + settings.queue_max,
            is_supervised=not self._is_on_network,
        )

    def run(self) -> int:
        """Work until SIGTERM or the supervisor's end; return the exit code.

        A worker on tcp:// has no supervisor: SIGTERM or Ctrl-C ends it.
        """
        signal.signal(signal.SIGTERM, self._on_signal)
        # Ctrl-C is the supervisor's to pass on, where there is one.
        signal.signal(signal.SIGINT, self._on_signal if self._is_on_network else signal.SIG_IGN)
        inference = threading.Thread(target=self._inference, name="inference", daemon=True)
        inference.start()
        self._mailbox.run(self._stop.is_set)
        self._stop.set()
        self._jobs.put(None)
        inference.join(STOP_WAIT_S)
        if self._sessions is not None:
            self._sessions.close()  # turns are small, and worth more than the KV of any of them
        if self._keeper is not None:
            self._keeper.shut(self._settings.shutdown_flush_seconds)
        self._port.close()
        return self._exit_code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop.set()
        self._port.wake()

    def _inference(self) -> None:
        """The inference thread: load, say ready, compute until told to stop."""
        try:
            self._compute()
        except StartError as error:
            _refuse(self._endpoint, error)
            os._exit(EXIT_CANNOT_START)
        except Exception:
            log.exception("the inference thread broke; the supervisor starts a clean worker")
            os._exit(EXIT_BROKEN)

    def _compute(self) -> None:
        settings = self._settings
        limit = memory_limit(settings)
        hold_memory(limit)
        steps = StartSteps(held_bytes)
        loaded = load_model(settings, steps.begin)
        steps.begin("images")
        sight = make_vision(loaded, settings)
        loaded = told(loaded, sight)
        chunk = settings.prefill_chunk or default_chunk()
        # Batching changes the last bits of what is decoded, and cannot take quantised KV.
        batches = not (is_exact(loaded, settings) or settings.kv_bits)
        engine = Engine(loaded, batches, sight.vision if sight is not None else None)
        with engine.stream():
            steps.begin("cache")
            keeper = make_kv_manager(engine, loaded, settings, chunk)
            self._keeper = keeper
            memory = MemoryGuard(room_in(limit), held_bytes)
            rule = CutRule(chunk, turn_marks(loaded.tokenizer))
            steps.begin("sessions")
            sessions = make_sessions(
                settings,
                chunk,
                is_exact(loaded, settings),
                self._worker_id,
                turns_directory(settings.kv_cache_dir, loaded) if settings.max_kv_size_gb else None,
            )
            self._sessions = sessions
            recorder = TurnRecorder(
                sessions,
                reuses=isinstance(keeper, KVManager),
                foresee=lambda job: self._jobs.put((job.request.ticket, job)),
            )
            steps.begin("prompts")
            vocabulary = Vocabulary(loaded.tokenizer)
            scheduler = Scheduler(
                engine,
                keeper,
                vocabulary,
                end_of_turn_ids(loaded.tokenizer, loaded.generation_config),
                functools.partial(self._choose, loaded.facts.vocab_size),
                SchedulerRules(
                    settings.live_slots_max,
                    rule.natural,
                    forwarded_at_once(chunk, sight),
                    recorder.ended,
                    self._inbox.put,
                    GenerationWatchdog(
                        settings.generation_watchdog_seconds, settings.stall_seconds
                    ),
                    memory,
                ),
            )
            self._mailbox.errand = functools.partial(
                self._errand, keeper, scheduler, sessions, sight
            )
            self._start_prompt_thread(loaded, vocabulary, rule, sessions, sight)
            loop = InferenceThread(
                self._inbox, scheduler, self._mailbox.send, sweep_of(keeper, memory)
            )
            self._loop, self._loaded, self._scheduler = loop, loaded, scheduler
            facts = loaded.facts
            log.info("ready model=%s layout=%s %s", facts.name, facts.cache_layout, steps.end())
            while not self._stop.is_set():
                loop.run_once()
            keeper.hand_over()
        engine.close()

    def _errand(
        self,
        keeper: KVManager | NullKVManager,
        scheduler: Scheduler,
        sessions: SessionManager,
        sight: VisionParts | None,
        ticket: ClientLease,
        message: Status,
    ) -> None:
        """Have the inference thread tell about the cache, after emptying it or giving up a pin."""

        def run() -> Told | Failed:
            if message.what == "unpin" and not keeper.unpin(message.about, message.key):
                text = f"No pin {message.about!r:.80} is in this worker; /v1/cache lists them."
                return Failed(message.request_id, 404, "not_found", text)
            if message.what == "clear_cache":
                scheduler.forget()
                sessions.forget_lines()
                if sight is not None:
                    sight.forget()
            report = cache_report(keeper, scheduler.idle_tokens, message.key)
            report |= {"sessions": sessions.counters(), "vision": vision_report(sight)}
            report |= scheduler.report() | {"wire_waiting_frames": self._port.waiting_frames}
            return Told(message.request_id, report)

        self._inbox.put(InferenceTask(ticket, run))

    def _choose(self, vocab_size: int, request: Request) -> TokenChoice:
        return make_token_choice(
            request.sampling, self._settings, vocab_size, request.prompt_tokens, request.guide
        )

    def _start_prompt_thread(
        self,
        loaded: LoadedModel,
        vocabulary: Vocabulary,
        rule: CutRule,
        sessions: SessionManager,
        sight: VisionParts | None,
    ) -> None:
        end_ids = end_of_turn_ids(loaded.tokenizer, loaded.generation_config)
        context_tokens = loaded.facts.context_tokens
        form = sight.form if sight is not None else None
        builder = make_builder(
            loaded.tokenizer, rule.marks, end_ids, context_tokens, self._settings, form
        )
        root = cache_root(loaded, self._settings, rule.chunk)
        prompter = PromptThread(
            self._settings,
            builder,
            sessions,
            rule,
            vocabulary,
            prompt_facts(loaded, root, builder, vocabulary, self._start_image_thread(sight)),
        )
        run = functools.partial(prompter.run, self._jobs, self._inbox.put, self._mailbox.send)
        _start_thread("prompt", run)

    def _start_image_thread(self, sight: VisionParts | None) -> Look | None:
        """Return what has the images of a message read; None for a model that takes none."""
        if sight is None:
            return None
        unread: UnreadJobs = queue.SimpleQueue()
        run = ImageThread(sight.reader).run
        _start_thread("image", functools.partial(run, unread, self._jobs.put, self._mailbox.send))
        return lambda ticket, message: unread.put((ticket, message))

    def _heartbeat(self, arriving: Sequence[str]) -> Heartbeat:
        scheduler, loop, loaded = self._scheduler, self._loop, self._loaded
        if scheduler is None or loop is None or loaded is None:
            return Heartbeat("loading", 0, 0, 0, 0, None)
        load = scheduler.load(len(arriving))
        queue = [*load.queue, *arriving]
        return Heartbeat(
            "ready",
            load.running,
            len(queue),
            scheduler.steps,
            loop.active_bytes,
            loaded.facts,
            load.wait_s,
            queue[:QUEUE_TOLD_MAX],
        )


def sweep_of(keeper: KVManager | NullKVManager, memory: MemoryGuard) -> Callable[[], bool]:
    """Return what gives up old slots, and says where a budget is nearly used up."""
    marks = [Watermark("Memory", "MEMORY_LIMIT_MB", memory.used, memory.limit)]
    if isinstance(keeper, KVManager):
        budget = keeper.store.budget
        marks.append(
            Watermark("Kept KV", "CACHE_RAM_BUDGET_MB", lambda: budget.bytes_used, budget.bytes_max)
        )

    def sweep() -> bool:
        for mark in marks:
            mark.look()
        return keeper.sweep()

    return sweep


def _start_thread(name: str, run: Callable[[], None]) -> None:
    """Start a thread that works as long as the process, which ends if the thread breaks."""

    def work() -> None:
        try:
            run()
        except Exception:
            log.exception("the %s thread broke; the supervisor starts a clean worker", name)
            os._exit(EXIT_BROKEN)

    threading.Thread(target=work, name=name, daemon=True).start()


def _refuse(endpoint: str, error: StartError) -> None:
    """Say why this worker cannot start, to who reads the log and to the supervisor."""
    print(f"Hearth cannot start: {error}", file=sys.stderr, flush=True)
    try:
        leave_reason(endpoint, str(error))
    except OSError as lost:
        log.warning("the supervisor is not told why: %s", lost)


def _keys(settings: Settings, endpoint: str) -> CurveKeys | None:
    """Return what a worker on the network needs; one on a socket of this machine needs nothing."""
    if endpoint.startswith("ipc://"):
        return None
    return curve_keys(settings.curve_keys_dir, WORKER_NAME, PROXY_NAME)


def main() -> int:
    parser = argparse.ArgumentParser(prog="hearth.worker.main", description=__doc__)
    parser.add_argument("--worker-id", type=int, required=True)
    parser.add_argument("--endpoint", required=True)
    options = parser.parse_args()
    try:
        settings = load_settings(os.environ, env_file())
        name = f"worker-{options.worker_id}"
        configure(settings.log_level.upper(), name, settings.log_prompts)
        worker = Worker(settings, options.worker_id, options.endpoint)
    except StartError as error:
        _refuse(options.endpoint, error)
        return EXIT_CANNOT_START
    return worker.run()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads that use MLX must not outlive the interpreter
