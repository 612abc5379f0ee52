"""Runs the project's scheduler, KV manager and disk tier over a layout that is only counted."""

import contextlib
import heapq
import itertools
import queue
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple
from unittest import mock

from hearth.shared.settings_from_env import Settings, load_settings
from hearth.shared.stop_times import FLUSH_WAIT_S
from hearth.shared.wire_messages import Failed, Finished, Sampling, Up, Usage
from hearth.worker.disk import file_store, open_file_store
from hearth.worker.engine import prefill_lengths as lengths_module
from hearth.worker.engine.footprint import MemoryUse
from hearth.worker.engine.forward_memory import forward_memory
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.kv import return_freed_memory, serialise_kv
from hearth.worker.kv.idle_expiry import IdleExpiry
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.prompt.prefill_cuts import CutRule, TurnMarks
from hearth.worker.schedule.memory_guard import MemoryGuard
from hearth.worker.schedule.request_state import ClientLease, Request
from hearth.worker.schedule.scheduler import Scheduler
from hearth.worker.schedule.scheduler_config import SchedulerConfig
from hearth.worker.setup import cut_rule_setup, kv_setup, rank_setup
from hearth.worker.setup.concurrency import running_max
from hearth.worker.setup.memory_setup import WorkerMemory, relief_of
from hearth.worker.stream.output_processor import OutputProcessor
from hearth.worker.threads.inference_thread import InferenceThread
from scripts.harness.layouts import counted_disk
from scripts.harness.layouts.counted_disk import (
    CountedDiskThread,
    CountedFileStore,
    Disk,
    MeteredFileStore,
)
from scripts.harness.layouts.counted_layers import CountedLayerMap
from scripts.harness.layouts.model_layouts import ModelLayout
from scripts.harness.layouts.session_scripts import SessionScript
from scripts.harness.layouts.simulated_clock import SimulatedClock
from scripts.harness.mac.fake_mac import FakeMac
from scripts.harness.mac.mac_hardware import MB, Mac
from scripts.harness.store_builders import ROOT

LIBRARIES_BYTES: Final = 900 * MB  # what a process holds beside MLX's arrays
KV_ITEM_BYTES: Final = 2
ANSWER_TOKENS_MAX: Final = 4_096  # more than any answer has
DISK_GB: Final = 1_000  # of every Mac's SSD: most that have memory for such models have as much
SHARED_MEMORY: Final = Path("/dev/shm")  # files that are holes are made fastest there
FOREVER: Final = float("inf")


class Signs:
    """Stands in for a vocabulary and its detokenisers: every token is one letter."""

    def detokeniser(self) -> "Signs":
        return self

    def add(self, token_id: int) -> str:
        return "x"

    def token_bytes(self, token_id: int) -> bytes:
        return b"x"


class Inbox:
    """What the inference thread waits at; waiting for it is what lets simulated time pass."""

    def __init__(self, clock: SimulatedClock) -> None:
        self.disk_thread: CountedDiskThread | None = None
        self._clock = clock
        self._items: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()

    def put(self, item: Any, at_s: float | None = None) -> None:
        """Have `item` arrive at `at_s`, by default now."""
        at_s = self._clock.elapsed_s if at_s is None else at_s
        heapq.heappush(self._items, (at_s, next(self._numbers), item))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return what has arrived, or arrives within `timeout`. Raises queue.Empty."""
        end = self._clock.elapsed_s + (timeout or 0.0 if block else 0.0)
        while True:
            if self.disk_thread is not None:
                self.disk_thread.catch_up()
            if self._items and self._items[0][0] <= self._clock.elapsed_s:
                return heapq.heappop(self._items)[2]
            nexts = [end, self._items[0][0] if self._items else FOREVER]
            if self.disk_thread is not None and (due_at := self.disk_thread.due_at) is not None:
                nexts.append(due_at)
            if self._clock.elapsed_s >= end:
                raise queue.Empty
            self._clock.advance_to(min(nexts))


@dataclass(slots=True)
class _Play:
    """A session that is being played."""

    session: SessionScript
    pause_s: float
    ended_at: dict[int, float] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        return len(self.ended_at) == len(self.session.turns)

    def ready(self) -> Iterator[tuple[int, float]]:
        """Yield the turns that may be sent now that others have ended, and when."""
        for number, turn in enumerate(self.session.turns):
            if number in self.sent or not all(n in self.ended_at for n in turn.waits_for):
                continue
            self.sent.add(number)
            after = max((self.ended_at[n] for n in turn.waits_for), default=None)
            pause_s = self.pause_s if after is not None else 0.0
            yield number, (after or 0.0) + turn.gap_s + pause_s


class CountedWorker:
    """One worker with a model of real size on a Mac, from its start to its end.

    Owner: the thread that simulates. To be used within `counted`.
    """

    def __init__(
        self,
        layout: ModelLayout,
        clock: SimulatedClock,
        engine: Any,
        settings: Settings,
        marks: TurnMarks,
    ) -> None:
        """Start it. `engine` is a `CountedEngine`, or one of arrays with the same methods.

        Raises:
            StartError: the model does not fit.
        """
        self.layout, self.clock = layout, clock
        self.settings = settings
        self.engine = engine
        memory = WorkerMemory(settings, "ipc:///nowhere/worker-0.sock")
        self._end_ids: set[int] = set()  # of the session that is played
        self._kv_bytes: Callable[[], int] = lambda: 0
        memory.use = MemoryUse(lambda: LIBRARIES_BYTES + self._arrays(), self._arrays, lambda: 0)
        memory.admit(layout.weight_bytes)
        loaded = layout.loaded(settings.max_kv_size)
        lengths = lengths_module.prefill_lengths(loaded)
        chunk = settings.prefill_chunk or lengths.chunk
        self.rule = CutRule(chunk, marks, lengths.gap, lengths.step_min, lengths.full_to)
        manager = kv_setup.make_kv_manager(self.engine, loaded, settings, self.rule)
        assert isinstance(manager, KVManager), "mlx-lm's caches are known"
        self.manager = manager
        self._kv_bytes = self._held_bytes
        batches = not manager.rules.is_exact
        self.engine.made(manager._layers, batches)
        forward = forward_memory(layout.text_config, self.rule.grid, KV_ITEM_BYTES, "metal")
        loaded = memory.fit(loaded, manager.uncached.cold_bytes, forward)
        self.context_tokens = loaded.facts.context_tokens
        memory.share_out(manager, self.context_tokens, forward)
        self.inbox = Inbox(clock)
        if manager.disk is not None:
            assert isinstance(manager.disk.thread, CountedDiskThread)
            self.inbox.disk_thread = manager.disk.thread
            manager.disk.thread.sweep()
        self.scheduler = self._make_scheduler(loaded, memory.guard(forward))
        self.engine.is_idle = lambda: self.scheduler.is_idle
        self.loop = self._make_loop(memory)
        self.answered: dict[int, Usage] = {}  # by the number of the turn
        self.refused: Counter[str] = Counter()
        self.kept_bytes_max = 0
        self.slot_bytes_max = 0

    def _make_scheduler(self, loaded: LoadedModel, guard: MemoryGuard) -> Scheduler:
        ends: Any = self._end_ids
        signs: Any = Signs()
        config = SchedulerConfig(
            running_max=running_max(self.settings, self.engine.decoder.is_mergeable),
            natural_cuts=self.rule.natural,
            grid=self.rule.grid,
            ended=self._ended,
            post=self.inbox.put,
            memory=guard,
            relief=relief_of(self.manager),
        )
        return Scheduler(
            self.engine,
            self.manager,
            signs,
            ends,
            lambda request: self.engine.choice(request.request_id),
            cut_rule_setup.with_goal_beside(config, loaded, self.settings),
        )

    def _make_loop(self, memory: WorkerMemory) -> InferenceThread:
        def watch() -> int:
            memory.measure()
            return memory.use.bytes_used()

        inbox: Any = self.inbox
        sweep, expire = self.manager.sweep, IdleExpiry(self.manager).step
        return InferenceThread(inbox, self.scheduler, self._take, sweep, expire, watch)

    # ------------------------------------------------------------ memory

    def _arrays(self) -> int:
        return self.layout.weight_bytes + self._kv_bytes()

    def _held_bytes(self) -> int:
        manager = self.manager
        slots = sum(map(manager.slot_bytes, manager.slots))
        return manager.store.budget.bytes_used + slots + self.engine.decoder.batch_bytes

    # ------------------------------------------------------------ requests

    def play(self, session: SessionScript, pause_s: float = 0.0, quiet_s: float = 0.0) -> None:
        """Have a session's requests answered as captured, then let `quiet_s` pass: once.

        `pause_s` passes before each turn beside what was captured.
        """
        self._play = _Play(session, pause_s)
        self._end_ids.update(turn.answer[-1] for turn in session.turns)
        self._send_ready(self.clock.elapsed_s)
        while not self._play.is_over:
            self._turn()
        end = self.clock.elapsed_s + quiet_s
        while self.clock.elapsed_s < end:
            self._turn()

    def _turn(self) -> None:
        self.loop.run_once()
        budget = self.manager.store.budget
        self.kept_bytes_max = max(self.kept_bytes_max, budget.bytes_used)
        slots = sum(map(self.manager.slot_bytes, self.manager.slots))
        self.slot_bytes_max = max(self.slot_bytes_max, slots)

    def _send_ready(self, start: float = 0.0) -> None:
        for number, at_s in list(self._play.ready()):
            self._send(number, max(at_s, start, self.clock.elapsed_s))

    def _send(self, number: int, at_s: float) -> None:
        session = self._play.session
        turn = session.turns[number]
        if turn.length > self.context_tokens:
            self.refused["context"] += 1
            self._over(number, at_s)
            return
        lease = ClientLease(str(number), b"peer")
        lease.received_at += at_s - self.clock.elapsed_s
        lease.lease_until = FOREVER
        signs: Any = Signs()
        request = Request(
            lease=lease,
            ids=turn.ids,
            query=session.query(number, self.rule, ROOT),
            sampling=Sampling(),
            tokens_max=ANSWER_TOKENS_MAX,
            output=OutputProcessor(signs, []),
            asker=turn.asker,
        )
        self.engine.scripts[lease.request_id] = list(turn.answer)
        self.inbox.put(request, at_s)

    def _ended(self, request: Request, usage: Usage, reason: str, stop: str | None) -> Usage:
        query = self._play.session.next_query(int(request.request_id), self.rule, ROOT)
        if query is not None and len(query.tokens) < self.context_tokens:
            self.inbox.put(query)  # the prompt thread renders meanwhile
        return usage

    def _take(self, message: Up) -> None:
        """Take what a client is sent."""
        if isinstance(message, Finished):
            self.answered[int(message.request_id)] = message.usage
            self._over(int(message.request_id), self.clock.elapsed_s)
        elif isinstance(message, Failed):
            self.refused[message.code] += 1
            self._over(int(message.request_id), self.clock.elapsed_s)

    def _over(self, number: int, at_s: float) -> None:
        self._play.ended_at[number] = at_s
        self._send_ready()

    # ------------------------------------------------------------ the end

    def stop(self) -> None:
        """End as at SIGTERM: hand over to the disk what it lacks, and let it write."""
        self.scheduler.leave_forwards()
        self.manager.hand_over()
        self.manager.shut(FLUSH_WAIT_S)


def settings_of(directory: Path, more: Mapping[str, str]) -> Settings:
    """Return the default settings of a server whose files are in `directory`."""
    environ = {"MODEL_PATH": "counted", "KV_CACHE_DIR": str(directory / "kv")}
    environ["MAX_KV_SIZE_GB"] = str(DISK_GB // open_file_store.DISK_SHARE)
    return load_settings(environ | {"LOG_ROOT": str(directory / "logs")} | dict(more), None)


class Simulated(NamedTuple):
    """What the workers of one Mac have in common, one after another."""

    clock: SimulatedClock
    disk: Disk
    directory: Path  # of the KV files


@contextlib.contextmanager
def counted(mac: Mac, has_arrays: bool = False) -> Iterator[Simulated]:
    """Have the project's parts count instead of store, on this Mac, within the block.

    Where it `has_arrays`, only clocks and counters are replaced: arrays and files are real.
    """
    clock, disk = SimulatedClock(), Disk()
    file_store_class = MeteredFileStore if has_arrays else CountedFileStore

    def store(*args: Any, **more: Any) -> MeteredFileStore:
        made = file_store_class(*args, **({"now": clock.time} | more))
        made.disk = disk
        return made

    def thread(*args: Any, **more: Any) -> CountedDiskThread:
        made = CountedDiskThread(*args, **more)
        made.clock = clock
        return made

    replaced: list[tuple[Any, str, Any]] = [
        (open_file_store, "FileStore", store),
        (rank_setup, "DiskThread", thread),
        (kv_setup, "cache_root", lambda *_, **__: ROOT),
        (lengths_module, "backend", lambda: "metal"),
        (cut_rule_setup, "backend", lambda: "metal"),
        (return_freed_memory, "_LIBC", object()),
    ]
    if not has_arrays:
        replaced += [
            (rank_setup, "LayerMap", CountedLayerMap),
            (file_store, "encode", counted_disk.encode),
            (file_store, "read", counted_disk.reader(disk)),
            (serialise_kv, "_array", counted_disk.array_of),
            (serialise_kv, "_restored", counted_disk.restored),
        ]
    with contextlib.ExitStack() as stack:
        place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        directory = stack.enter_context(TemporaryDirectory(dir=place))
        stack.enter_context(FakeMac(mac).installed())
        stack.enter_context(clock.installed())
        for holder, name, value in replaced:
            stack.enter_context(mock.patch.object(holder, name, value))
        yield Simulated(clock, disk, Path(directory))
