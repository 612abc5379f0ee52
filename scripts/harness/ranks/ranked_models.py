"""Drives rank 0 of several processes without sockets to a proxy, one small model after another."""

import dataclasses
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import generation_stream

from hearth.shared.settings_from_env import load_settings
from hearth.shared.zmq_rank_port import RankContext
from hearth.shared.zmq_transport import ipc_endpoint
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.ranks.leading_rank import LeadingRank
from hearth.worker.ranks.rank_link import LeaderLink
from hearth.worker.ranks.start_ranks import told_settings
from hearth.worker.ranks.transport.leader_link import LinkTerms, TransportLeaderLink
from hearth.worker.ranks.transport.rank_hosts import are_local, read_hosts
from hearth.worker.ranks.transport.rank_processes import RankProcesses
from hearth.worker.ranks.transport.tensor_group import join_group, plan_tensors
from hearth.worker.stream.detokenise import Vocabulary
from scripts.harness.ranks.models_follower import MODEL
from scripts.harness.socketless_worker import Machine

FOLLOWER: Final = (sys.executable, "-m", "scripts.harness.ranks.models_follower")
STALL_SECONDS: Final = 30
MLX_NAMES: Final = ("MLX_RANK", "MLX_HOSTFILE")  # which no child of ours may take for its own


class RankedModels:
    """Rank 0 and its followers; use as a context manager, once in the life of a process.

    A rank that is lost has the others killed, so that a sum in which this process waits fails:
    nothing hangs, and `failure` says why. Owner: the thread that made it.
    """

    def __init__(
        self, ranks: int, wrap: Callable[[LeaderLink], LeaderLink] = lambda link: link
    ) -> None:
        """`wrap` may put something between what is told and the link, as faults are."""
        self.failed_at = 0.0
        self._directory = tempfile.TemporaryDirectory(prefix="hearth-ranks-")
        root = Path(self._directory.name)
        told = {"RANKS": str(ranks), "STALL_SECONDS": str(STALL_SECONDS), "RUN_DIR": str(root)}
        self._settings = load_settings(told, None)
        hosts = read_hosts(None, ranks)
        tensors = plan_tensors("ring", hosts, are_local(hosts))
        terms = LinkTerms(hosts, STALL_SECONDS, tensors, told_settings(self._settings))
        endpoints = (ipc_endpoint(root / "said"), ipc_endpoint(root / "told"))
        context = RankContext(None, is_leader=True)
        self.link = TransportLeaderLink(terms, context, endpoints, self._end)
        self._processes = RankProcesses(
            range(1, ranks), self.link.endpoint, self._lose, FOLLOWER
        )
        self._is_closing = False
        self.link.wait_for_all(lambda: bool(self.link.failure))
        self.group = join_group(tensors, 0, ranks)
        for name in MLX_NAMES:
            os.environ.pop(name, None)
        self.rank = LeadingRank(wrap(self.link), self.group, "tensor")

    @property
    def failure(self) -> str:
        """Return why a rank is lost; empty where none is."""
        return self.link.failure

    @property
    def pids(self) -> dict[int, int]:
        return self._processes.pids

    def _lose(self, rank: int, why: str) -> None:
        if not self._is_closing:
            self.link.lose(rank, why)

    def _end(self, _code: int, _why: str) -> None:
        self.failed_at = time.monotonic()
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)

    def load(self, directory: Path) -> LoadedModel:
        """Have every rank load its part of another model."""
        self.link.tell(MODEL, str(directory))
        settings = dataclasses.replace(self._settings, model_path=str(directory))
        with mx.stream(generation_stream):
            part = self.rank.part(lambda _nbytes: None)
            return self.rank.joined(load_model(settings, part=part))

    def engine(self, loaded: LoadedModel, *, is_exact: bool) -> Engine:
        """Return an engine of all ranks; of two, only the later may compute."""
        with mx.stream(generation_stream):
            return self.rank.engine(loaded, not is_exact)

    def machine(self, loaded: LoadedModel, **more: Any) -> Machine:
        tokenizer = loaded.tokenizer
        marks, words = turn_marks(tokenizer), Vocabulary(tokenizer)
        return Machine(loaded, marks, words, rank=self.rank, **more)

    def __enter__(self) -> "RankedModels":
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._is_closing = True
        self._processes.close()
        self.link.close()
        self._directory.cleanup()
