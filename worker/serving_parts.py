"""Makes all parts that serve one model, bottom up: cache, sessions, scheduler, threads."""

import functools
import queue
from dataclasses import dataclass
from pathlib import Path

from hearth.shared.settings import Settings
from hearth.shared.stop_signals import FLUSH_WAIT_S
from hearth.shared.suspects import DIRECTORY, SuspectStore
from hearth.worker.cache.prefill_grid import WHOLE
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.engine.decode.sampler import (
    SamplingParams,
    make_sampling_params,
    sampling_defaults,
)
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.forward_memory import forward_of
from hearth.worker.engine.mlx_memory import held_bytes
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.kv.idle_work import IdleExpiry
from hearth.worker.kv.kv_manager import KVManager, NullKVManager
from hearth.worker.prompt.awaited_work import while_client_waits
from hearth.worker.schedule.answer_drafts import AnswerDrafts
from hearth.worker.schedule.request_ending import TurnRecorder
from hearth.worker.schedule.request_state import Request
from hearth.worker.schedule.scheduler import Scheduler
from hearth.worker.schedule.scheduler_config import GenerationWatchdog, SchedulerConfig
from hearth.worker.schedule.suspects import Suspects
from hearth.worker.sessions.session_manager import SessionManager
from hearth.worker.setup.doctor_setup import ModelDoctor, are_trees_cheap, draft_policy
from hearth.worker.setup.kv_setup import (
    cut_rule_of,
    disk_scan_of,
    is_exact,
    make_kv_manager,
    running_max,
    sweep_of,
    with_goal_beside,
)
from hearth.worker.setup.load_setup import VisionParts, load_all
from hearth.worker.setup.memory_setup import WorkerMemory, relief_of
from hearth.worker.setup.prompt_and_session_setup import end_ids_of, make_prompts, sessions_of
from hearth.worker.setup.rank_setup import SingleRank
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.threads.inference_thread import InferenceThread
from hearth.worker.threads.prompt_thread import PromptThread, read_images
from hearth.worker.threads.shutdown import Shutdown
from hearth.worker.threads.start_worker import StartSteps
from hearth.worker.threads.thread_queues import ImageJobs, Inbox, PromptLanes
from hearth.worker.threads.wire_thread import WireThread


@dataclass(frozen=True, slots=True)
class ServingParts:
    """Holds the parts that serve a loaded model.

    Owner: the inference thread; the wire thread reads load and facts.
    """

    loaded: LoadedModel
    engine: Engine
    vision: VisionParts | None
    kv_manager: KVManager | NullKVManager
    sessions: SessionManager
    scheduler: Scheduler
    loop: InferenceThread
    memory: WorkerMemory
    doctor: ModelDoctor
    grammars: GrammarCompiler
    suspects: Suspects
    rank: SingleRank


class ModelStart:
    """Makes a worker's ServingParts, and ends them even if the start was cut short.

    Owner: the inference thread; the thread that ends the worker calls `write`.
    """

    def __init__(
        self,
        settings: Settings,
        worker_id: int,
        endpoint: str,
        shutdown: Shutdown,
        wire: WireThread,
        jobs: PromptLanes,
        inbox: Inbox,
    ) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._endpoint = endpoint
        self._shutdown = shutdown
        self._wire = wire
        self._jobs = jobs
        self._inbox = inbox
        self._defaults = sampling_defaults(settings)
        self.steps = StartSteps(held_bytes, on_step=shutdown.record_step)
        self.rank = SingleRank()
        self._memory: WorkerMemory | None = None
        self._sessions: SessionManager | None = None
        self._kv_manager: KVManager | NullKVManager | None = None

    def write(self) -> None:
        """Write sessions and kept KV to disk."""
        if self._sessions is not None:
            self._sessions.close()  # first, because turns are small and worth more than KV
        if self._kv_manager is not None:
            self._kv_manager.close_disk(FLUSH_WAIT_S)

    def release_memory_share(self) -> None:
        """Release this worker's share of memory, once the worker has left the device."""
        if self._memory is not None:
            self._memory.share.release()

    def make(self) -> ServingParts:
        """Load the model, and make and start the parts that serve the model.

        Raises:
            StartError: a part cannot be loaded, or does not fit.
            SystemExit: the worker ends.
        """
        settings, begun = self._settings, self._shutdown.is_begun
        if settings.ranks > 1:
            from hearth.worker.ranks.leading_rank import lead  # not imported for a single rank

            self.rank = lead(settings, self._worker_id, self._endpoint, begun)
        memory = self._memory = WorkerMemory(settings, self._endpoint, self.rank)
        with while_client_waits(self._shutdown):
            loaded, vision = load_all(settings, self.steps, memory, begun, self.rank)
        doctor = ModelDoctor(settings, loaded, self._worker_id == 0)
        self._settings = settings = doctor.settings
        self._defaults = sampling_defaults(settings, loaded.generation_config)
        # Batching changes the last bits of decoded KV.
        batches = not is_exact(loaded, settings)
        engine = self.rank.engine(
            loaded,
            batches,
            vision.encoder if vision is not None else None,
            (settings.kv_bits, settings.kv_group_size) if settings.kv_bits else None,
            trees=batches and are_trees_cheap(doctor.found, is_cpu=loaded.facts.backend == "cpu"),
        )
        with engine.stream(), while_client_waits(self._shutdown):
            return self._make_parts(loaded, vision, engine, memory, doctor)

    def sampling_params(self, loaded: LoadedModel, request: Request) -> SamplingParams:
        """Return the sampling params of `request`. Inference thread."""
        return make_sampling_params(
            request.sampling,
            self._defaults,
            loaded.facts.vocab_size,
            request.prompt_tokens,
            request.guide,
        )

    def _make_parts(
        self,
        loaded: LoadedModel,
        vision: VisionParts | None,
        engine: Engine,
        memory: WorkerMemory,
        doctor: ModelDoctor,
    ) -> ServingParts:
        """Make the parts bottom up: cache, sessions, scheduler, the other threads."""
        settings, rank, steps = self._settings, self.rank, self.steps
        most = running_max(settings, engine.decoder.is_mergeable)
        self._wire.open_max = most + settings.queue_max
        cut_rule = cut_rule_of(loaded, settings)
        steps.begin("cache")
        kv_manager = self._kv_manager = make_kv_manager(engine, loaded, settings, cut_rule, rank)
        forward = rank.forward(forward_of(loaded, cut_rule.grid))
        loaded = memory.fit(loaded, kv_manager.uncached.cold_bytes, forward)
        memory.share_out(kv_manager, loaded.facts.context_tokens, forward)
        guard = memory.guard(forward)
        relief = relief_of(kv_manager)
        steps.begin("sessions")
        sessions = self._sessions = sessions_of(loaded, settings, cut_rule.chunk, self._worker_id)
        steps.begin("prompts")
        vocabulary = Vocabulary(loaded.tokenizer)
        store = SuspectStore(settings.kv_cache_dir / DIRECTORY)
        suspects = Suspects(store, Path(self._endpoint.removeprefix("ipc://")), cut_rule.label)
        drafts = draft_policy(
            settings,
            doctor.found,
            engine,
            is_exact=is_exact(loaded, settings),
            is_cpu=loaded.facts.backend == "cpu",
        )
        recorder = TurnRecorder(
            sessions,
            (lambda: kv_manager.evictions) if isinstance(kv_manager, KVManager) else None,
            lambda job: self._jobs.put((job.request.lease, job)),
        )
        config = SchedulerConfig(
            running_max=most,
            natural_cuts=cut_rule.natural,
            # If the model cannot split images, a forward reads each image whole.
            grid=cut_rule.grid if vision is None or vision.encoder.splits_images else WHOLE,
            ended=recorder.ended,
            post=self._inbox.put,
            watchdog=GenerationWatchdog(
                settings.generation_watchdog_seconds, settings.stall_seconds
            ),
            memory=guard,
            relief=relief,
            drafts=AnswerDrafts(drafts, loaded.draft_model),
            suspects=suspects,
        )
        scheduler = Scheduler(
            engine,
            kv_manager,
            vocabulary,
            end_ids_of(loaded.tokenizer, loaded.generation_config),
            functools.partial(self.sampling_params, loaded),
            with_goal_beside(config, loaded, settings),
        )
        prompts = make_prompts(
            loaded,
            settings,
            cut_rule,
            vocabulary,
            sessions,
            drafts,
            vision.form if vision is not None else None,
        )
        scan = disk_scan_of(kv_manager, settings.workers)
        self._start_threads(PromptThread(prompts, settings, suspects, scan), vision)
        grammars = prompts.facts.grammar_compiler

        def watch_memory() -> int:
            memory.measure()
            relief.step()
            rank.tidy()
            grammars.end_idle()
            return memory.use.bytes_used()

        loop = InferenceThread(
            self._inbox,
            scheduler,
            self._wire.send,
            sweep_of(kv_manager, guard),
            IdleExpiry(kv_manager).step if isinstance(kv_manager, KVManager) else lambda: False,
            watch_memory,
        )
        loop.checks = doctor.checks(cut_rule, guard)
        return ServingParts(
            loaded=loaded,
            engine=engine,
            vision=vision,
            kv_manager=kv_manager,
            sessions=sessions,
            scheduler=scheduler,
            loop=loop,
            memory=memory,
            doctor=doctor,
            grammars=grammars,
            suspects=suspects,
            rank=rank,
        )

    def _start_threads(self, prompts: PromptThread, vision: VisionParts | None) -> None:
        """Start the prompt threads, and the image thread if the model takes images."""
        send = self._wire.send
        for number, lane in enumerate(self._jobs.lanes):
            run = functools.partial(prompts.run, lane, self._inbox.put, send)
            self._shutdown.start_thread(f"prompt-{number}", run)
        if vision is not None:
            images: ImageJobs = queue.SimpleQueue()
            read = functools.partial(read_images, vision.reader, images, self._jobs.put, send)
            self._shutdown.start_thread("image", read)
            self._wire.image_jobs = images
