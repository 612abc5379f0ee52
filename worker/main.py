"""Runs one worker process: `python -m hearth.worker.main`, started by a supervisor.

That is the server's, or that of `hearth worker`, whose worker also listens on tcp://, for proxies
on other machines.

Threads: this one is the wire thread (socket, heartbeats); `inference` loads the model and is the
only one that touches MLX; `prompt-0` to `prompt-2` render and tokenise; `image`, where the model
takes images, reads their files.
"""

import functools
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import Settings
from hearth.shared.stop_signals import FLUSH_WAIT_S
from hearth.shared.suspects import DIRECTORY, SuspectStore
from hearth.shared.wire_messages import Failed, Heartbeat, Status, Told
from hearth.shared.zmq_transport import PROXY_NAME, WORKER_NAME, RouterPort, curve_keys
from hearth.worker.engine import mlx_lm_open_files  # noqa: F401  before all that imports mlx_lm

# isort: split
from hearth.worker.cache_report import (
    cache_report,
    correctness_counts,
    quantisation_report,
    vision_report,
)
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.doctor.findings import Findings
from hearth.worker.engine.decode.sampler import TokenChoice, make_token_choice, sampling_defaults
from hearth.worker.engine.engine import Engine, leave_device
from hearth.worker.engine.forward_memory import forward_of
from hearth.worker.engine.mlx_memory import held_bytes
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.kv.null_kv_manager import NullKVManager
from hearth.worker.prompt.awaited_work import while_awaited
from hearth.worker.prompt.prefill_cuts import CutRule
from hearth.worker.requests.session_prompt_builder import SessionPromptBuilder
from hearth.worker.schedule.answer_drafts import AnswerDrafts, DraftPolicy
from hearth.worker.schedule.request_ending import TurnRecorder
from hearth.worker.schedule.request_state import RenderNextPrompt, Request
from hearth.worker.schedule.scheduler import Scheduler
from hearth.worker.schedule.scheduler_config import GenerationWatchdog, SchedulerConfig
from hearth.worker.schedule.suspects import Suspects
from hearth.worker.sessions.session_manager import SessionManager
from hearth.worker.setup.cut_rule_setup import cut_rule_of, with_goal_beside
from hearth.worker.setup.doctor_setup import ModelDoctor
from hearth.worker.setup.draft_setup import are_trees_cheap, draft_policy
from hearth.worker.setup.kv_setup import (
    cache_root,
    evictions_of,
    expire_of,
    is_exact,
    look_of,
    make_kv_manager,
    running_max,
    sweep_of,
)
from hearth.worker.setup.load_setup import load_all
from hearth.worker.setup.memory_setup import WorkerMemory, relief_of
from hearth.worker.setup.prompt_and_session_setup import (
    end_ids_of,
    make_builder,
    make_sessions,
    prompt_facts,
    turns_directory,
)
from hearth.worker.setup.rank_setup import SingleRank
from hearth.worker.setup.vision_setup import VisionParts, image_grid
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.threads.image_thread import read_images
from hearth.worker.threads.inference_thread import InferenceThread
from hearth.worker.threads.prompt_thread import PromptThread
from hearth.worker.threads.shutdown import Shutdown
from hearth.worker.threads.start_worker import StartSteps, refuse_start, run_worker
from hearth.worker.threads.thread_queues import ImageJobs, Inbox, InferenceTask, PromptLanes
from hearth.worker.threads.wire_thread import WireThread

log = logging.getLogger("hearth.worker")

QUEUE_NAMED_MAX = 256  # waiting requests that a heartbeat names


@dataclass(frozen=True, slots=True)
class ServingParts:
    """Serves a loaded model. Owner: the inference thread; the wire thread reads load and facts."""

    loaded: LoadedModel
    vision: VisionParts | None
    kv_manager: KVManager | NullKVManager
    sessions: SessionManager
    scheduler: Scheduler
    loop: InferenceThread
    memory: WorkerMemory
    doctor: ModelDoctor
    grammars: GrammarCompiler
    suspects: Suspects


class Worker:
    """Wires the threads together; each part says in its own docstring who owns it.

    Invariant: `_parts` is None until the model can be served; heartbeats say "loading" meanwhile.
    """

    def __init__(
        self, settings: Settings, worker_id: int, endpoint: str, listens_on: str = ""
    ) -> None:
        """Bind `endpoint`, its supervisor's, and the one on tcp:// that it `listens_on`, if any.

        Raises:
            StartError: one of them cannot be bound, or there are no keys.
        """
        self._settings = settings
        self._sampling_defaults = sampling_defaults(settings)
        self._worker_id = worker_id
        self._endpoint = endpoint
        self._jobs = PromptLanes()
        self._inbox: Inbox = queue.SimpleQueue()
        self._parts: ServingParts | None = None
        self._steps: StartSteps | None = None  # of its start
        self._sessions: SessionManager | None = None  # to be closed, even if the start is cut short
        self._kv_manager: KVManager | NullKVManager | None = None
        self._memory: WorkerMemory | None = None
        self._rank = SingleRank()
        self._draft_policy = DraftPolicy()
        self._running_max = running_max(settings, is_batched=True)  # until the model is known
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
            open_max=self._running_max + settings.queue_max,
        )

    def run(self) -> int:
        """Work until SIGTERM or the supervisor's end; return the exit code."""
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
        with shutdown.guard("wire"):  # heartbeats go on: a silent worker is killed
            self._wire.end_requests(tells=not shutdown.exit_code)
            self._wire.run(is_over.is_set)
        ending.join()
        self._port.close()
        return shutdown.exit_code

    def _end(self, inference: threading.Thread, is_over: threading.Event) -> None:
        """Wait for the chunk in flight, then write what is kept."""
        try:
            self._shutdown.wait_for(inference)
            if not self._shutdown.exit_code:
                if self._sessions is not None:
                    self._sessions.close()  # turns are small, and worth more than KV
                if self._kv_manager is not None:
                    self._kv_manager.shut(FLUSH_WAIT_S)
                if not inference.is_alive():
                    self._rank.end()
            self._shutdown.note_end(inference)
        finally:
            is_over.set()
            self._port.wake()

    # ------------------------------------------------------------ the inference thread

    def _inference(self) -> None:
        """Load the model and serve it until the worker ends; leave the device, also if it broke."""
        with self._shutdown.guard("inference"):
            try:
                self._load_and_serve()
            except StartError as error:
                self._shutdown.begin(refuse_start(self._endpoint, error))
            except Exception:
                self._rank.note_broken()
                raise
        leave_device()
        if self._memory is not None:
            self._memory.share.give_up()  # the device was left before

    def _load_and_serve(self) -> None:
        """Load the model, make all that serves it, and compute until the worker ends."""
        steps = self._steps = StartSteps(held_bytes, on_step=self._shutdown.note_step)
        rank = self._rank = self._start_ranks() if self._settings.ranks > 1 else self._rank
        memory = self._memory = WorkerMemory(self._settings, self._endpoint, rank)
        with while_awaited(self._shutdown):
            loaded, vision = load_all(self._settings, steps, memory, self._shutdown.is_begun, rank)
        doctor = ModelDoctor(self._settings, loaded, self._worker_id == 0)
        self._settings = doctor.settings
        self._sampling_defaults = sampling_defaults(self._settings, loaded.generation_config)
        engine = self._make_engine(loaded, vision, doctor.found)
        with engine.stream():
            with while_awaited(self._shutdown):
                parts = self._make_parts(loaded, vision, engine, memory, steps, doctor)
            self._wire.run_in_inference = functools.partial(self._answer_in_inference, parts)
            self._parts = parts
            facts = loaded.facts
            counts = correctness_counts(parts.kv_manager, parts.sessions)
            log.info(
                "ready model=%s layout=%s %s %s",
                facts.name,
                facts.cache_layout,
                steps.end(),
                " ".join(f"{name}={count}" for name, count in counts.items()),
            )
            while not self._shutdown.is_begun():
                parts.loop.run_once()
            parts.scheduler.leave_forwards()
            if not self._shutdown.exit_code:
                parts.kv_manager.hand_over()

    def _start_ranks(self) -> SingleRank:
        from hearth.worker.ranks.leading_rank import lead  # which one rank alone does not need

        return lead(self._settings, self._worker_id, self._endpoint, self._shutdown.is_begun)

    def _make_engine(
        self, loaded: LoadedModel, vision: VisionParts | None, found: Findings | None
    ) -> Engine:
        # Batching changes the last bits of what is decoded.
        batches = not is_exact(loaded, self._settings)
        settings = self._settings
        engine = self._rank.engine(
            loaded,
            batches,
            vision.encoder if vision is not None else None,
            (settings.kv_bits, settings.kv_group_size) if settings.kv_bits else None,
            trees=batches and are_trees_cheap(found, is_cpu=loaded.facts.backend == "cpu"),
        )
        self._running_max = running_max(settings, engine.decoder.is_mergeable)
        self._wire.open_max = self._running_max + settings.queue_max
        return engine

    def _make_parts(
        self,
        loaded: LoadedModel,
        vision: VisionParts | None,
        engine: Engine,
        memory: WorkerMemory,
        steps: StartSteps,
        doctor: ModelDoctor,
    ) -> ServingParts:
        """Make what serves the model, bottom up: cache, sessions, scheduler, the other threads."""
        cut_rule = cut_rule_of(loaded, self._settings)
        steps.begin("cache")
        settings, rank = self._settings, self._rank
        kv_manager = self._kv_manager = make_kv_manager(engine, loaded, settings, cut_rule, rank)
        forward = rank.forward(forward_of(loaded, cut_rule.grid))
        loaded = memory.fit(loaded, kv_manager.uncached.cold_bytes, forward)
        memory.share_out(kv_manager, loaded.facts.context_tokens, forward)
        guard = memory.guard(forward)
        relief = relief_of(kv_manager)
        steps.begin("sessions")
        sessions = self._sessions = self._make_sessions(loaded, cut_rule.chunk)
        steps.begin("prompts")
        vocabulary = Vocabulary(loaded.tokenizer)
        store = SuspectStore(settings.kv_cache_dir / DIRECTORY)
        suspects = Suspects(store, Path(self._endpoint.removeprefix("ipc://")), cut_rule.label)
        exact, is_cpu = is_exact(loaded, settings), loaded.facts.backend == "cpu"
        self._draft_policy = draft_policy(
            settings, doctor.found, engine, is_exact=exact, is_cpu=is_cpu
        )
        config = SchedulerConfig(
            running_max=self._running_max,
            natural_cuts=cut_rule.natural,
            grid=image_grid(cut_rule.grid, vision),
            ended=TurnRecorder(sessions, evictions_of(kv_manager), self._render_next).ended,
            post=self._inbox.put,
            watchdog=GenerationWatchdog(
                settings.generation_watchdog_seconds, settings.stall_seconds
            ),
            memory=guard,
            relief=relief,
            drafts=AnswerDrafts(self._draft_policy, loaded.draft_model),
            suspects=suspects,
        )
        scheduler = Scheduler(
            engine,
            kv_manager,
            vocabulary,
            end_ids_of(loaded.tokenizer, loaded.generation_config),
            functools.partial(self.token_choice, loaded.facts.vocab_size),
            with_goal_beside(config, loaded, settings),
        )
        grammars = self._start_prompt_threads(
            loaded, vocabulary, cut_rule, sessions, vision, suspects
        )
        self._start_image_thread(vision)
        sweep, expire = sweep_of(kv_manager, guard), expire_of(kv_manager)

        def watch_memory() -> int:
            memory.measure()
            relief.step()
            rank.tidy()
            grammars.end_idle()
            return memory.use.bytes_used()

        loop = InferenceThread(self._inbox, scheduler, self._wire.send, sweep, expire, watch_memory)
        loop.checks = doctor.checks(cut_rule, guard)
        return ServingParts(
            *(loaded, vision, kv_manager, sessions, scheduler),
            *(loop, memory, doctor, grammars, suspects),
        )

    def _make_sessions(self, loaded: LoadedModel, chunk: int) -> SessionManager:
        settings = self._settings
        return make_sessions(
            settings,
            chunk,
            is_exact(loaded, settings),
            self._worker_id,
            None
            if settings.max_kv_size_gb == 0
            else turns_directory(settings.kv_cache_dir, loaded),
            loaded.facts.name,
        )

    def token_choice(self, vocab_size: int, request: Request) -> TokenChoice:
        """Return how the tokens of `request` are chosen. Inference thread."""
        defaults, tokens = self._sampling_defaults, request.prompt_tokens
        return make_token_choice(request.sampling, defaults, vocab_size, tokens, request.guide)

    def _render_next(self, job: RenderNextPrompt) -> None:
        self._jobs.put((job.request.lease, job))

    def _answer_in_inference(self, parts: ServingParts, message: Status) -> None:
        """Have the inference thread answer a Status, after what it asks for is done."""
        answer = functools.partial(self._answer_status, parts, message)
        self._inbox.put(InferenceTask(answer))

    def _answer_status(self, parts: ServingParts, message: Status) -> Told | Failed:
        """Report on the cache, after it was emptied or a pin given up. Inference thread."""
        kv_manager, scheduler = parts.kv_manager, parts.scheduler
        if message.what in ("doctor", "check_again"):
            return Told(message.request_id, parts.doctor.answer(message.what))
        if message.what == "unpin" and not kv_manager.unpin(message.about, message.key):
            text = f"No pin {message.about!r:.80} is in this worker; /v1/cache lists them."
            return Failed(message.request_id, 404, "not_found", text)
        if message.what == "clear_cache":
            scheduler.forget()
            parts.sessions.forget_lines()
            parts.suspects.clear(message.key)
            parts.grammars.end_idle(0.0)
            if parts.vision is not None:
                parts.vision.forget()
        report = cache_report(
            kv_manager,
            scheduler.idle_tokens,
            message.key,
            parts.loaded.facts,
            scheduler.decoder.batch_bytes,
            parts.loaded.adapters.identities,
        )
        report |= {
            "adapters": parts.loaded.adapters.report(),
            "quantisation": quantisation_report(kv_manager),
            "dtype": parts.loaded.dtype.row(),
            "ranks": self._rank.report(parts.loop.active_bytes),
            "trunks": scheduler.decoder.trunks_report(),
            "sessions": parts.sessions.counters(),
            "vision": vision_report(parts.vision),
            "grammars": parts.grammars.report(),
            "suspects": parts.suspects.report(message.key),
            **scheduler.report(message.key),
            **parts.memory.report(),
            "wire_waiting_frames": len(self._port.outbox),
        }
        return Told(message.request_id, report)

    # ------------------------------------------------------------ the other threads

    def _start_prompt_threads(
        self,
        loaded: LoadedModel,
        vocabulary: Vocabulary,
        cut_rule: CutRule,
        sessions: SessionManager,
        vision: VisionParts | None,
        suspects: Suspects,
    ) -> GrammarCompiler:
        builder = make_builder(
            loaded.tokenizer,
            cut_rule.marks,
            end_ids_of(loaded.tokenizer, loaded.generation_config),
            loaded.facts.context_tokens,
            self._settings,
            vision.form if vision is not None else None,
            loaded.facts.context_by,
        )
        root = cache_root(loaded, self._settings)
        facts = prompt_facts(loaded, root, builder, vocabulary, cut_rule)
        facts = replace(facts, drafts=self._draft_policy, adapters=loaded.adapters.identities)
        facts.grammar_compiler.load()
        prompts = SessionPromptBuilder(builder, sessions, facts)
        look = look_of(self._kv_manager, self._settings.workers)
        thread = PromptThread(prompts, facts, self._settings, suspects, look)
        for number, lane in enumerate(self._jobs.lanes):
            run = functools.partial(thread.run, lane, self._inbox.put, self._wire.send)
            self._shutdown.start_thread(f"prompt-{number}", run)
        return facts.grammar_compiler

    def _start_image_thread(self, vision: VisionParts | None) -> None:
        """Have the images of messages read, where the model takes any."""
        if vision is None:
            return
        jobs: ImageJobs = queue.SimpleQueue()
        self._shutdown.start_thread(
            "image",
            functools.partial(read_images, vision.reader, jobs, self._jobs.put, self._wire.send),
        )
        self._wire.image_jobs = jobs

    def _heartbeat(self, arriving: Sequence[str]) -> Heartbeat:
        parts = self._parts
        if parts is None:
            steps = self._steps
            return Heartbeat("loading", 0, 0, 0, 0, None) if steps is None else steps.heartbeat()
        load = parts.scheduler.load(len(arriving))
        queue, facts, pace = [*load.queue, *arriving], parts.loaded.facts, parts.scheduler.pace
        is_cpu = facts.backend == "cpu" and facts.ranks == 1  # several wait for each other busily
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
        *("hearth.worker.main", __doc__, "worker"),
        lambda settings, told: Worker(settings, told.worker_id, told.endpoint, told.listen),
    )


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads that use MLX must not outlive the interpreter
