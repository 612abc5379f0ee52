"""Makes rank 0's parts of a worker whose model is computed by several processes.

Owner: the inference thread.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from hearth.shared.errors import StartError
from hearth.shared.settings import Settings
from hearth.shared.worker_files import leave_reason
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_store import FileStore
from hearth.worker.engine.compute_dtype import ComputeDtype
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.forward_memory import ForwardMemory
from hearth.worker.engine.model_loader import LoadedModel, backend
from hearth.worker.engine.vision.image_encoding_and_positions import ImageEncoder
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.ranks.agreed_tokens import Sum, sum_over
from hearth.worker.ranks.disk.leading_disk_thread import lead_disk
from hearth.worker.ranks.follower import STOP
from hearth.worker.ranks.leading_engine import LeadingEngine
from hearth.worker.ranks.leading_layer_map import LeadingLayerMap
from hearth.worker.ranks.loading.sharded_model import Sharded, check_same_model, model_facts
from hearth.worker.ranks.named_kv import Telling
from hearth.worker.ranks.rank_link import RankRoom
from hearth.worker.ranks.start_ranks import OFF, start_ranks
from hearth.worker.ranks.transport.leader_link import LeaderLink
from hearth.worker.setup.rank_setup import SingleRank

log = logging.getLogger(__name__)


def lead(
    settings: Settings, worker_id: int, endpoint: str, is_over: Callable[[], bool]
) -> SingleRank:
    """Start the other ranks of a model, and return this one's parts. Inference thread.

    Raises:
        StartError: a setting asks for what several ranks cannot do, or they cannot be started.
        SystemExit: the process ends.
    """
    refuse_device(settings.ranks, backend())
    log.info("RANKS is %d, without %s (docs/ranks.md)", settings.ranks, ", ".join(OFF))
    leave = functools.partial(leave_reason, endpoint)  # beside the worker's own socket
    started = start_ranks(settings, worker_id, leave, is_over)

    def close() -> None:
        started.link.close()
        started.processes.close()

    return LeadingRank(started.link, started.group, settings.rank_split, close)


def refuse_device(ranks: int, computed_by: str) -> None:
    """Raise StartError where MLX computes on CUDA and its ring and MPI sum on the CPU.

    Seen on an H200: after some hundred forwards `mx.async_eval` of the next one waits for ever.
    """
    if computed_by == "cuda":
        raise StartError(
            f"RANKS is {ranks}, and MLX computes on CUDA here, where forwards that wait for sums "
            "of other ranks were seen to stand still. Set RANKS=1."
        )


class LeadingRank(SingleRank):
    """Rank 0 of several, with the link to the others. See `SingleRank`."""

    def __init__(
        self,
        link: LeaderLink,
        group: mx.distributed.Group,
        split: str,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`split` is RANK_SPLIT; `close` ends the link and the processes."""
        self._close = close
        self.telling = Telling(link)
        self._group = group
        self._split = split
        self._total: Sum = sum_over(group)
        self.rooms: dict[int, RankRoom] = {}  # at the start, of ranks whose heartbeat says none
        self._heard_rooms: dict[int, RankRoom] = {}  # as of the last look, and what they allow
        self._limit = 0
        self.byte_share = 1.0
        self._is_serving = False
        self.ranks_here = [*link.hosts].count(link.hosts[0])

    def part(self) -> Sharded:
        self._part = Sharded(self._group, self._split, self._tell_load)
        return self._part

    def _tell_load(self, dtype: ComputeDtype) -> None:
        """Have the others load their parts while this one does."""
        hosts = [*self.telling.link.hosts]
        self.telling.tell("load", dtype.name, list(map(hosts.count, hosts)))

    def joined(self, loaded: LoadedModel) -> LoadedModel:
        nbytes = loaded.facts.weight_bytes
        hosts, others = self.telling.link.hosts, []
        for rank, (failure, facts, theirs, *room) in enumerate(self.telling.ask("loaded"), 1):
            if failure:
                raise StartError(f"Rank {rank} ({hosts[rank]}) cannot load its part: {failure}")
            nbytes += theirs
            self.rooms[rank] = RankRoom(*room)
            others.append(facts)
        check_same_model(model_facts(loaded), others, hosts)
        whole = dataclasses.replace(
            loaded.facts,
            weight_bytes=nbytes,
            parameter_count=self._part.parameter_count,
            ranks=self._group.size(),
        )
        return dataclasses.replace(loaded, facts=whole)

    def engine(
        self,
        loaded: LoadedModel,
        batches: bool,
        vision: ImageEncoder | None = None,
        packed: tuple[int, int] | None = None,
        trees: bool = False,
    ) -> Engine:
        assert vision is None and packed is None, "neither comes to several ranks"
        self._is_serving = True
        return LeadingEngine(loaded, batches, self.telling, self._total)

    def layer_map(self, probe: list[Any]) -> LayerMap:
        layers = LeadingLayerMap(probe, self.telling)
        self.byte_share, self._heard_rooms = layers.byte_share, {}
        return layers

    def disk_thread(self, file_store: FileStore, queue_bytes: int) -> DiskThread:
        return lead_disk(self.telling, file_store, queue_bytes)

    def forward(self, forward: ForwardMemory) -> ForwardMemory:
        """A rank with a part of the heads computes scores of those alone."""
        if self._split == "pipeline":
            return forward
        return dataclasses.replace(forward, pair_bytes=forward.pair_bytes // self._group.size())

    def limit(self, used: int) -> int:
        """See `SingleRank`. Until another rank says more, what it takes moves as this one's does.

        What it said last does not have in it what was admitted since then.
        """
        rooms = self._told_rooms()
        if rooms != self._heard_rooms:
            left = min(room.limit_bytes - room.used_bytes for room in rooms.values())
            self._heard_rooms, self._limit = rooms, used + int(left / self.byte_share)
        return self._limit

    def _told_rooms(self) -> dict[int, RankRoom]:
        told = dict(self.telling.link.rooms)  # of no bytes, until a rank has looked
        return self.rooms | {rank: room for rank, room in told.items() if room.limit_bytes}

    def tidy(self) -> None:
        if self.telling.is_quiet():
            self.telling.tell("release_memory")

    def report(self, used_bytes: int) -> dict[str, Any] | None:
        return rank_report(self.telling.link.hosts, self._split, used_bytes, self._told_rooms())

    def end(self) -> None:
        if self._is_serving:  # else some may load for minutes yet
            self.telling.ask(STOP)  # they have written by then
        self._close()

    def note_broken(self) -> None:
        self.telling.link.wait_for_failure()


def rank_report(
    hosts: Sequence[str], split: str, used_bytes: int, rooms: Mapping[int, RankRoom]
) -> dict[str, Any]:
    """Return for `/v1/cache` the ranks; `used_bytes` are rank 0's, `rooms` the others'."""
    rows: list[dict[str, Any]] = [{"rank": 0, "host": hosts[0], "used_bytes": used_bytes}]
    for rank, host in enumerate(hosts[1:], 1):
        room = rooms.get(rank, RankRoom(0, 0))
        row = {"rank": rank, "host": host, "used_bytes": room.used_bytes}
        rows.append(row | {"limit_bytes": room.limit_bytes})
    return {"count": len(hosts), "split": split, "ranks": rows, "off": dict(OFF)}
