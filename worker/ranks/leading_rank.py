"""Makes rank 0's parts of a worker whose model is computed by several processes.

Every rank computes what rank 0 computes: forwards of prompts and steps of answers. Rank 0 decides:
what a follower would ask its scheduler or its KV manager amid an operation, it waits to be told.
Whatever that makes rank 0 do is told before the answer, `returned`.
Owner: the inference thread.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from hearth.shared.errors import StartError
from hearth.shared.settings import Settings
from hearth.shared.worker_files import leave_reason
from hearth.worker.cache.image_keys import ImageRun
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_store import FileStore
from hearth.worker.engine.compute_dtype import ComputeDtype
from hearth.worker.engine.decode.batch_split import ReadCost
from hearth.worker.engine.decode.decoder import Decoder
from hearth.worker.engine.decode.decoding_sequence import DecodingSequence, SampledToken
from hearth.worker.engine.decode.tree_forward import TreeForward
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.forward_memory import ForwardMemory
from hearth.worker.engine.model_loader import LoadedModel, backend
from hearth.worker.engine.vision.image_encoding_and_positions import ImageEncoder
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.ranks.agreed_tokens import (
    LeadingTokens,
    Sum,
    check_sums,
    checksum,
    said_facts,
    sum_over,
)
from hearth.worker.ranks.leader_link import LeaderLink
from hearth.worker.ranks.leading_kv import LeadingLayerMap, Telling, handle_of, lead_disk
from hearth.worker.ranks.rank_link import RETURNED, STOP, RankRoom, Value
from hearth.worker.ranks.sharded_model import Sharded, check_same_model, model_facts
from hearth.worker.ranks.start_ranks import OFF, start_ranks
from hearth.worker.setup.rank_setup import SingleRank


class LeadingEngine(Engine):
    """The engine of rank 0: what it computes the followers compute too, on their part.

    Owner: the inference thread.

    Raises:
        StartError: answers share forwards on this rank and not on another.
    """

    def __init__(self, loaded: LoadedModel, batches: bool, telling: Telling, total: Sum) -> None:
        self._telling = telling
        self._total = total
        self._is_told = False
        super().__init__(loaded, batches)
        is_mergeable = self.decoder.is_mergeable
        for rank, answer in enumerate(telling.ask("engine", is_mergeable), 1):
            if answer != is_mergeable:
                raise StartError(
                    f"Answers can share forwards on rank {rank if answer else 0} alone, and not on "
                    f"rank {0 if answer else rank}. Set RANK_SPLIT=tensor, or fewer RANKS."
                )
        self._is_told = True

    def _make_decoder(
        self, batches: bool, tree_forward: TreeForward | None, try_trunks: Callable[[], bool]
    ) -> Decoder:
        return LeadingDecoder(self._model, batches, self._telling, self._total)

    @property
    def verifies_drafts(self) -> bool:
        """Tell that nobody drafts here: the trial would compute what no other rank was told."""
        return False

    def new_cache(self) -> list[Any]:
        layers = super().new_cache()
        if not self._is_told:
            return layers
        cache = self._telling.cache(layers)
        self._telling.tell("new_cache", cache.handle)
        return cache

    def prefill(
        self,
        cache: list[Any],
        ids: list[int],
        images: Sequence[ImageRun] = (),
        adapter: str = "",
    ) -> None:
        assert not images and not adapter, "neither comes to several ranks"
        told = list(map(int, ids))
        self._telling.tell("prefill", handle_of(cache), told)
        self._telling.link.witness("prefill", handle_of(cache), len(ids), checksum(told))
        super().prefill(cache, ids)


class LeadingDecoder(Decoder):
    """The decoder of rank 0, whose steps the followers' do too. Nothing is drafted."""

    def __init__(self, model: Any, is_mergeable: bool, telling: Telling, total: Sum) -> None:
        self._tokens_said = LeadingTokens(telling.link, total)
        super().__init__(model, generation_stream, is_mergeable, agree=self._tokens_said)
        self._telling = telling
        self._told_cost = ReadCost()

    def add(self, sequence: DecodingSequence) -> None:
        assert sequence.drafter is None and sequence.adapter is None and not sequence.shift
        cache, count = handle_of(sequence.cache), len(sequence.tokens)
        tail = list(map(int, sequence.tail))
        self._telling.tell("add", sequence.request_id, cache, count, tail, sequence.tokens_max)
        self._telling.link.witness("add", cache, count, checksum(tail))
        told = dataclasses.replace(
            sequence,
            lineage=None,  # trunks are not shared
            before_forward=self._replayed(sequence.before_forward),
            before_join=self._replayed(sequence.before_join),
            join_bytes=self._replayed(sequence.join_bytes),
            take_back=self._replayed(self._naming(sequence.take_back)),
        )
        super().add(told)

    def step(self) -> list[SampledToken]:
        if self.cost != self._told_cost:
            self._told_cost = self.cost
            self._telling.tell("cost", list(dataclasses.astuple(self.cost)))
        self._telling.tell("step")
        pairs = self._tokens_said.take()
        sampled = super().step()
        check_sums(pairs)
        self._telling.link.witness(*said_facts([one.token_id for one in sampled]))
        return sampled

    def remove(self, request_id: str, kept: int | None = None) -> DecodingSequence | None:
        """See `Decoder.remove`; the cache that is left has a new number, wherever it was before."""
        handle = self._telling.new_handle()
        self._telling.tell("remove", request_id, kept, handle)
        left = super().remove(request_id, kept)
        if left is None:
            return None
        named = self._telling.cache(left.cache, handle)
        left.cache = named
        return left

    def _finds_room(self, nbytes: int) -> bool:
        return bool(self._replayed(super()._finds_room)(nbytes))

    def _replayed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what calls `call` and tells the followers, who wait for it, what it gave."""

        def run(*arguments: Any) -> Any:
            value: Value = call(*arguments)
            self._telling.tell(RETURNED, value)
            return value

        return run

    def _naming(self, take_back: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        """Return what gives `take_back` a cache that all ranks know by a number."""

        def run(layers: list[Any]) -> None:
            cache = self._telling.cache(layers)
            self._telling.tell("given", cache.handle)
            take_back(cache)

        return run


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
