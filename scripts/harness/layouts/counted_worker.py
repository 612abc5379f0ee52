"""Runs the project's scheduler, KV manager and disk tier over a layout that is only counted."""

import contextlib
import queue
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest import mock

from hearth.shared.settings import Settings, load_settings
from hearth.shared.stop_signals import FLUSH_WAIT_S
from hearth.shared.wire_messages import Failed, Finished, Sampling, Up, Usage
from hearth.worker.disk import file_store, open_file_store
from hearth.worker.engine import prefill_lengths
from hearth.worker.engine.forward_memory import forward_of
from hearth.worker.engine.system_state import MemoryUse
from hearth.worker.kv import memory_release, serialise_kv
from hearth.worker.kv.idle_work import IdleExpiry
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.schedule.request_state import AnswerDeltas, ClientLease, Request
from hearth.worker.schedule.scheduler import Scheduler
from hearth.worker.schedule.scheduler_config import SchedulerConfig
from hearth.worker.setup import kv_setup, rank_setup
from hearth.worker.setup.kv_setup import running_max
from hearth.worker.setup.memory_setup import WorkerMemory, relief_of
from hearth.worker.stream.output_processor import OutputProcessor
from hearth.worker.threads.inference_thread import InferenceThread
from scripts.harness.layouts.counted_disk import (
    NEVER,
    CountedDiskThread,
    Disk,
    MeteredFileStore,
    array_of,
    restored,
    write_hole,
)
from scripts.harness.layouts.counted_engine import TimedEngine
from scripts.harness.layouts.counted_layers import CountedLayerMap
from scripts.harness.layouts.model_layouts import ModelLayout
from scripts.harness.layouts.session_scripts import SessionScript
from scripts.harness.layouts.simulated_clock import SimulatedClock
from scripts.harness.mac.fake_mac import FakeMac
from scripts.harness.mac.mac_hardware import MB, Mac
from scripts.harness.store_builders import ROOT

LIBRARIES_BYTES: Final = 900 * MB  # what a process holds beside MLX's arrays
ANSWER_TOKENS_MAX: Final = 4_096  # more than any answer has
DISK_GB: Final = 1_000  # of every Mac's SSD: most that have memory for such models have as much
SHARED_MEMORY: Final = Path("/dev/shm")  # files that are holes are made fastest there
QUIET_S: Final = 60.0  # behind a session
# Stands in for a detokeniser: every token is one letter.
LETTERS: Final[Any] = SimpleNamespace(add=lambda _token_id: "x")


class Inbox:
    """What the inference thread waits at; waiting for it is what lets simulated time pass."""

    def __init__(self, clock: SimulatedClock, disk_thread: CountedDiskThread | None) -> None:
        self._clock, self._disk_thread = clock, disk_thread
        self._items: list[tuple[float, Any]] = []  # by the times at which they arrive

    def put(self, item: Any, at_s: float | None = None) -> None:
        """Have `item` arrive at `at_s`, by default now."""
        at_s = self._clock.elapsed_s if at_s is None else at_s
        insort(self._items, (at_s, item), key=lambda each: each[0])

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return what has arrived, or arrives within `timeout`. Raises queue.Empty."""
        end = self._clock.elapsed_s + (timeout or 0.0)
        while True:
            due_at = NEVER if self._disk_thread is None else self._disk_thread.catch_up()
            arrives_at = self._items[0][0] if self._items else NEVER
            if arrives_at <= self._clock.elapsed_s:
                return self._items.pop(0)[1]
            if self._clock.elapsed_s >= end:
                raise queue.Empty
            self._clock.advance(min(end, arrives_at, due_at) - self._clock.elapsed_s)


class CountedWorker:
    """One worker with a model of real size on a Mac, from its start to its end.

    Owner: the thread that simulates. To be used within `counted`.
    """

    def __init__(
        self,
        layout: ModelLayout,
        clock: SimulatedClock,
        engine: TimedEngine,
        settings: Settings,
        session: SessionScript,
        pause_s: float = 0.0,
    ) -> None:
        """Start it; `play` has `session` answered. `engine` may have served before.

        `pause_s` passes before each turn beside what was captured.

        Raises:
            StartError: the model does not fit.
        """
        self.layout, self.clock, self.engine = layout, clock, engine
        memory = self._memory = WorkerMemory(settings, "ipc:///nowhere/worker-0.sock")
        memory.admit(layout.weight_bytes)
        loaded = layout.loaded(settings.max_kv_size)
        with mock.patch.object(kv_setup, "turn_marks", lambda _: session.marks):
            self.rule = kv_setup.cut_rule_of(loaded, settings)
        manager = kv_setup.make_kv_manager(engine, loaded, settings, self.rule)
        assert isinstance(manager, KVManager), "mlx-lm's caches are known"
        self.manager = manager
        memory.use = MemoryUse(lambda: LIBRARIES_BYTES + self._arrays(), self._arrays, lambda: 0)
        engine.decoder.cost = layout.read_cost
        engine.decoder.is_mergeable &= not self.manager.rules.is_exact
        forward = forward_of(loaded, self.rule.grid)
        loaded = memory.fit(loaded, manager.uncached.cold_bytes, forward)
        self.context_tokens = loaded.facts.context_tokens
        memory.share_out(manager, self.context_tokens, forward)
        disk_thread = manager.disk.thread if manager.disk is not None else None
        if disk_thread is not None:
            disk_thread.file_store.sweep()
        self._inbox = Inbox(clock, cast(Any, disk_thread))
        config = SchedulerConfig(
            running_max=running_max(settings, engine.decoder.is_mergeable),
            natural_cuts=self.rule.natural,
            grid=self.rule.grid,
            ended=self._ended,
            post=self._inbox.put,
            memory=memory.guard(forward),
            relief=relief_of(manager),
        )
        self.scheduler = Scheduler(
            engine,
            manager,
            cast(Any, None),  # nobody asks for the words of log probabilities
            frozenset(turn.answer[-1] for turn in session.turns),
            lambda request: engine.choice(request.request_id),
            kv_setup.with_goal_beside(config, loaded, settings),
        )
        engine.is_idle = lambda: self.scheduler.is_idle

        self._loop = InferenceThread(
            *(cast(Any, self._inbox), self.scheduler, self._take),
            *(manager.sweep, IdleExpiry(manager).step, self._watch),
        )
        self.session = session
        self._pause_s = pause_s
        self._sent: set[int] = set()  # numbers of turns
        self._ended_at: dict[int, float] = {}
        self.answered: dict[int, Usage] = {}
        self.refused: Counter[str] = Counter()
        self.kept_bytes_max = self.slot_bytes_max = 0

    # ------------------------------------------------------------ memory

    @property
    def slot_bytes(self) -> int:
        return sum(map(self.manager.slot_bytes, self.manager.slots))

    def _arrays(self) -> int:
        return (
            self.layout.weight_bytes
            + self.slot_bytes
            + self.engine.decoder.batch_bytes
            + self.manager.store.budget.bytes_used
        )

    def _watch(self) -> int:
        self._memory.measure()
        return self._memory.use.bytes_used()

    # ------------------------------------------------------------ requests

    def play(self) -> None:
        """Have the session's requests answered as captured, then let QUIET_S pass: once."""
        self._send_ready()
        end = NEVER
        while self.clock.elapsed_s < end:
            self._loop.run_once()
            self.kept_bytes_max = max(self.kept_bytes_max, self.manager.store.budget.bytes_used)
            self.slot_bytes_max = max(self.slot_bytes_max, self.slot_bytes)
            if end == NEVER and len(self._ended_at) == len(self.session.turns):
                end = self.clock.elapsed_s + QUIET_S

    def _send_ready(self) -> None:
        """Send the turns whose predecessors have ended."""
        ready = [
            number
            for number, turn in enumerate(self.session.turns)
            if number not in self._sent and self._ended_at.keys() >= set(turn.waits_for)
        ]
        self._sent.update(ready)
        for number in ready:
            self._send(number)

    def _send(self, number: int) -> None:
        turn = self.session.turns[number]
        after_s = max((self._ended_at[n] for n in turn.waits_for), default=0.0)
        pause_s = self._pause_s if turn.waits_for else 0.0
        at_s = max(after_s + turn.gap_s + pause_s, self.clock.elapsed_s)
        if turn.length > self.context_tokens:
            self.refused["context"] += 1
            self._over(number, at_s)
            return
        lease = ClientLease(str(number), b"peer")
        lease.received_at += at_s - self.clock.elapsed_s
        lease.lease_until = NEVER
        self.engine.scripts[lease.request_id] = list(turn.answer)
        self._inbox.put(
            Request(
                lease=lease,
                ids=turn.ids,
                query=self.session.query(number, self.rule),
                sampling=Sampling(),
                tokens_max=ANSWER_TOKENS_MAX,
                output=OutputProcessor(LETTERS, []),
                deltas=AnswerDeltas(lease.request_id),
                queue_name=turn.asker,
            ),
            at_s,
        )

    def _ended(self, request: Request, usage: Usage, reason: str, stop: str | None) -> Usage:
        number = int(request.request_id)
        tokens = self.session.turns[number].next_tokens
        if tokens is not None and len(tokens) < self.context_tokens:
            # The prompt thread renders meanwhile.
            self._inbox.put(self.session.query(number, self.rule, is_next=True))
        return usage

    def _take(self, message: Up) -> None:
        """Take what a client is sent."""
        if isinstance(message, Finished):
            self.answered[int(message.request_id)] = message.usage
        elif isinstance(message, Failed):
            self.refused[message.code] += 1
        else:
            return
        self._over(int(message.request_id), self.clock.elapsed_s)

    def _over(self, number: int, at_s: float) -> None:
        self._ended_at[number] = at_s
        self._send_ready()

    # ------------------------------------------------------------ the end

    def stop(self) -> None:
        """End as at SIGTERM: hand over to the disk what it lacks, and let it write."""
        self.scheduler.leave_forwards()
        self.manager.queue_unwritten()
        self.manager.close_disk(FLUSH_WAIT_S)


def settings_of(directory: Path, more: Mapping[str, str]) -> Settings:
    """Return the default settings of a server whose files are in `directory`."""
    return load_settings(
        {
            "MODEL_PATH": "counted",
            "KV_CACHE_DIR": str(directory / "kv"),
            "MAX_KV_SIZE_GB": str(DISK_GB // open_file_store.DISK_SHARE),
            "LOG_ROOT": str(directory / "logs"),
            **more,
        },
        None,
    )


@contextlib.contextmanager
def counted(mac: Mac, has_arrays: bool = False) -> Iterator[tuple[SimulatedClock, Disk, Path]]:
    """Have the project's parts count instead of store, on this Mac, within the block.

    Yields what the workers of one Mac have in common, one after another; the path is their files'.
    Where it `has_arrays`, only clocks and counters are replaced: arrays and files are real.
    """
    clock, disk = SimulatedClock(), Disk()
    replaced: list[tuple[Any, str, Any]] = [
        (MeteredFileStore, "disk", disk),
        (CountedDiskThread, "clock", clock),
        (open_file_store, "FileStore", partial(MeteredFileStore, now=clock.time)),
        (rank_setup, "DiskThread", CountedDiskThread),
        (kv_setup, "cache_root", lambda *_, **__: ROOT),
        (prefill_lengths, "backend", lambda: "metal"),
        (kv_setup, "backend", lambda: "metal"),
        (memory_release, "_LIBC", object()),
    ]
    if not has_arrays:
        replaced += [
            (rank_setup, "LayerMap", CountedLayerMap),
            (file_store, "encode", disk.encode),
            (file_store, "read", disk.decode),
            (file_store, "write", write_hole),
            (serialise_kv, "_array", array_of),
            (serialise_kv, "_restored", restored),
        ]
    with (
        TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as directory,
        FakeMac(mac).installed(),
        clock.installed(),
        contextlib.ExitStack() as stack,
    ):
        for holder, name, value in replaced:
            stack.enter_context(mock.patch.object(holder, name, value))
        yield clock, disk, Path(directory)
