"""Drives rank 0 of several processes without sockets to a proxy, one small model after another."""

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest import mock

import mlx.core as mx
from mlx_lm.generate import generation_stream

from hearth.shared.settings import load_settings
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_store import FileStore
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.prompt.prefill_cuts import CutRule, TurnMarks
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.ranks import start_ranks
from hearth.worker.ranks.leader_link import LeaderLink
from hearth.worker.ranks.leading_rank import LeadingRank
from hearth.worker.ranks.rank_link import STOP
from hearth.worker.ranks.start_ranks import RankProcesses
from hearth.worker.schedule.answer_drafts import AnswerDrafts, DraftPolicy
from hearth.worker.stream.detokenise import Vocabulary
from scripts.harness.ranks.models_follower import COMMAND, MODEL
from scripts.harness.socketless_worker import CHUNK, Machine

DISK_GB: Final = 1


class RankedModels(ExitStack):
    """Rank 0 and its followers; use as a context manager, once in the life of a process.

    A rank that is lost has the others killed, so that a sum in which this process waits fails:
    nothing hangs, and `failure` says why. Owner: the thread that made it.
    """

    rank: LeadingRank  # once a model is loaded

    def __init__(self, ranks: int, wrap: Callable[[LeaderLink], Any] = lambda link: link) -> None:
        """`wrap` may put something between what is told and the link, as faults are: `link`."""
        super().__init__()
        self.size = ranks
        self.failed_at = 0.0
        directory = self.enter_context(tempfile.TemporaryDirectory(prefix="hearth-ranks-"))
        told = {
            "RANKS": str(ranks),
            "STALL_SECONDS": "30",
            "RUN_DIR": directory,
            "KV_CACHE_DIR": str(Path(directory, "kv")),
            "MAX_KV_SIZE_GB": str(DISK_GB),
            "LOG_LEVEL": "WARNING",
        }
        os.environ |= told  # of the followers too
        self._settings = load_settings(told, None)
        self._settings.instance_dir.mkdir()
        with mock.patch.object(start_ranks, "_end_process", self._end):
            self._ranks = start_ranks.start_ranks(self._settings, 0, print, command=COMMAND)
        self.link = wrap(self._ranks.link)
        self._disks: list[DiskThread] = []  # one, or none
        for close in (self._ranks.processes.close, self._ranks.link.close, self._close_disk):
            self.callback(close)

    @property
    def failure(self) -> str:
        """Return why a rank is lost; empty where none is."""
        return self._ranks.link.failure

    def _end(self, _leave: Any, processes: RankProcesses, _code: int, _why: str) -> None:
        """Stand in for the end of this process: the others end, and this one tells why."""
        self.failed_at = time.monotonic()
        processes.kill()

    def load(self, directory: Path, *, adds_noise: bool = False) -> LoadedModel:
        """Have every rank load its part of another model, and forget all but the files."""
        self._close_disk()
        if hasattr(self, "rank"):
            self._ranks.link.request(STOP)
        self._ranks.link.send(MODEL, str(directory), adds_noise)
        self.rank = LeadingRank(self.link, self._ranks.group, "tensor")
        told = dataclasses.replace(self._settings, model_path=str(directory))
        with mx.stream(generation_stream):
            return self.rank.joined(load_model(told, part=self.rank.part()))

    def _close_disk(self) -> None:
        while self._disks:
            self._disks.pop().close()

    def engine(self, loaded: LoadedModel, *, is_exact: bool) -> Engine:
        """Return an engine of all ranks; of two, only the later may compute."""
        with mx.stream(generation_stream):
            return self.rank.engine(loaded, not is_exact)

    def disk_thread(self, root: PrefixHash) -> DiskThread:
        """Open every rank's files of `root`, once a model."""
        label = CutRule(CHUNK, TurnMarks(frozenset(), ())).label
        store = FileStore(self._settings.kv_cache_dir, root, DISK_GB << 30, 0, rule=label)
        self._disks.append(self.rank.disk_thread(store, queue_bytes=64_000_000))
        return self._disks[0]

    def files_of(self, rank: int) -> list[Path]:
        """Return the KV files of a rank, in the order of their names."""
        root = self._settings.kv_cache_dir
        others = set() if rank else set(root.glob("rank-*-of-*/**/*"))
        found = set((root / (f"rank-{rank}-of-{self.size}" if rank else "")).rglob("*")) - others
        return sorted(path for path in found if path.is_file())

    def flush(self, seconds: float) -> bool:
        """Write what waits on rank 0; tell whether that was done in time. Others do at `stop`."""
        return all(disk.flush(seconds) for disk in self._disks)

    def machine(self, loaded: LoadedModel, **more: Any) -> Machine:
        marks, words = turn_marks(loaded.tokenizer), Vocabulary(loaded.tokenizer)
        more = {"drafts": AnswerDrafts(DraftPolicy())} | more  # several ranks draft nothing
        return Machine(loaded, marks, words, rank=self.rank, **more)
