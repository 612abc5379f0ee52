"""Makes rank 0's parts of a worker whose model is computed by several processes.

Every rank computes what rank 0 computes: forwards of prompts and steps of answers. Rank 0 decides:
where an operation calls the scheduler or the KV manager, a follower waits for rank 0's result.
Rank 0 sends the operations that the call causes, and then the result as `returned`.
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
    sum_over,
    token_facts,
)
from hearth.worker.ranks.leader_link import LeaderLink
from hearth.worker.ranks.leading_kv import FollowerCommands, LeadingLayerMap, handle_of, lead_disk
from hearth.worker.ranks.rank_link import RETURNED, STOP, RankMemory, Value
from hearth.worker.ranks.sharded_model import Sharded, check_same_model, model_facts
from hearth.worker.ranks.start_ranks import OFF, start_ranks
from hearth.worker.setup.rank_setup import SingleRank


class LeadingEngine(Engine):
    """The engine of rank 0, which makes the followers compute the same on their parts.

    Owner: the inference thread.

    Raises:
        StartError: answers can share forwards on some ranks only.
    """

    def __init__(
        self, loaded: LoadedModel, batches: bool, commands: FollowerCommands, total: Sum
    ) -> None:
        self._commands = commands
        self._total = total
        self._is_announced = False
        super().__init__(loaded, batches)
        is_mergeable = self.decoder.is_mergeable
        for rank, answer in enumerate(commands.request("engine", is_mergeable), 1):
            if answer != is_mergeable:
                raise StartError(
                    f"Answers can share forwards on rank {rank if answer else 0} alone, and not on "
                    f"rank {0 if answer else rank}. Set RANK_SPLIT=tensor, or fewer RANKS."
                )
        self._is_announced = True

    def _make_decoder(
        self, batches: bool, tree_forward: TreeForward | None, try_trunks: Callable[[], bool]
    ) -> Decoder:
        return LeadingDecoder(self._model, batches, self._commands, self._total)

    @property
    def verifies_drafts(self) -> bool:
        """Return False: the followers take no part in drafts, nor in their trial."""
        return False

    def new_cache(self) -> list[Any]:
        layers = super().new_cache()
        if not self._is_announced:
            return layers
        cache = self._commands.cache(layers)
        self._commands.send("new_cache", cache.handle)
        return cache

    def prefill(
        self,
        cache: list[Any],
        ids: list[int],
        images: Sequence[ImageRun] = (),
        adapter: str = "",
    ) -> None:
        assert not images and not adapter, "neither comes to several ranks"
        token_ids = list(map(int, ids))
        self._commands.send("prefill", handle_of(cache), token_ids)
        self._commands.link.witness("prefill", handle_of(cache), len(ids), checksum(token_ids))
        super().prefill(cache, ids)


class LeadingDecoder(Decoder):
    """The decoder of rank 0, which makes the followers do the same steps. Nothing is drafted."""

    def __init__(
        self, model: Any, is_mergeable: bool, commands: FollowerCommands, total: Sum
    ) -> None:
        self._agreed_tokens = LeadingTokens(commands.link, total)
        super().__init__(model, generation_stream, is_mergeable, agree=self._agreed_tokens)
        self._commands = commands
        self._sent_cost = ReadCost()

    def add(self, sequence: DecodingSequence) -> None:
        assert sequence.drafter is None and sequence.adapter is None and not sequence.shift
        cache, count = handle_of(sequence.cache), len(sequence.tokens)
        tail = list(map(int, sequence.tail))
        self._commands.send("add", sequence.request_id, cache, count, tail, sequence.tokens_max)
        self._commands.link.witness("add", cache, count, checksum(tail))
        announced = dataclasses.replace(
            sequence,
            lineage=None,  # trunks are not shared
            before_forward=self._announcing(sequence.before_forward),
            before_join=self._announcing(sequence.before_join),
            join_bytes=self._announcing(sequence.join_bytes),
            take_back=self._announcing(self._numbering(sequence.take_back)),
        )
        super().add(announced)

    def step(self) -> list[SampledToken]:
        if self.cost != self._sent_cost:
            self._sent_cost = self.cost
            self._commands.send("cost", list(dataclasses.astuple(self.cost)))
        self._commands.send("step")
        pairs = self._agreed_tokens.take_unchecked()
        sampled = super().step()
        check_sums(pairs)
        self._commands.link.witness(*token_facts([token.token_id for token in sampled]))
        return sampled

    def remove(self, request_id: str, kept: int | None = None) -> DecodingSequence | None:
        """See `Decoder.remove`; the remaining cache always gets a new handle."""
        handle = self._commands.new_handle()
        self._commands.send("remove", request_id, kept, handle)
        left = super().remove(request_id, kept)
        if left is None:
            return None
        named = self._commands.cache(left.cache, handle)
        left.cache = named
        return left

    def _finds_room(self, nbytes: int) -> bool:
        return bool(self._announcing(super()._finds_room)(nbytes))

    def _announcing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `call` and sends its result to the waiting followers."""

        def run(*arguments: Any) -> Any:
            value: Value = call(*arguments)
            self._commands.send(RETURNED, value)
            return value

        return run

    def _numbering(self, take_back: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        """Return a function that gives `take_back` the cache with a handle on all ranks."""

        def run(layers: list[Any]) -> None:
            cache = self._commands.cache(layers)
            self._commands.send("given", cache.handle)
            take_back(cache)

        return run


log = logging.getLogger(__name__)


def lead(
    settings: Settings, worker_id: int, endpoint: str, is_over: Callable[[], bool]
) -> SingleRank:
    """Start the other ranks of a model; return rank 0's parts of the worker. Inference thread.

    Raises:
        StartError: a setting asks for a feature that ranks do not have, or a rank cannot start.
        SystemExit: the process ends.
    """
    refuse_device(settings.ranks, backend())
    log.info("RANKS is %d, without %s (docs/ranks.md)", settings.ranks, ", ".join(OFF))
    leave = functools.partial(leave_reason, endpoint)  # writes a file beside the worker's socket
    started = start_ranks(settings, worker_id, leave, is_over)

    def close() -> None:
        started.link.close()
        started.processes.close()

    return LeadingRank(started.link, started.group, settings.rank_split, close)


def refuse_device(ranks: int, computed_by: str) -> None:
    """Raise StartError if MLX computes on CUDA, while its ring and MPI sum on the CPU.

    Seen on an H200: after some hundred forwards the next `mx.async_eval` waits for ever.
    """
    if computed_by == "cuda":
        raise StartError(
            f"RANKS is {ranks}, and MLX computes on CUDA here, where forwards that wait for sums "
            "of other ranks were seen to stand still. Set RANKS=1."
        )


class LeadingRank(SingleRank):
    """The parts of rank 0 of several ranks, with the link to the others. See `SingleRank`."""

    def __init__(
        self,
        link: LeaderLink,
        group: mx.distributed.Group,
        split: str,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`split` is RANK_SPLIT; `close` ends the link and the processes."""
        self._close = close
        self.commands = FollowerCommands(link)
        self._group = group
        self._split = split
        self._total: Sum = sum_over(group)
        self.start_memory: dict[int, RankMemory] = {}  # for ranks whose heartbeats have none yet
        self._last_memory: dict[int, RankMemory] = {}  # the memory from which `_limit` was computed
        self._limit = 0
        self.byte_share = 1.0
        self._is_serving = False
        self.ranks_here = [*link.hosts].count(link.hosts[0])

    def part(self) -> Sharded:
        self._part = Sharded(self._group, self._split, self._send_load)
        return self._part

    def _send_load(self, dtype: ComputeDtype) -> None:
        """Make the other ranks load their parts while this rank loads its own."""
        hosts = [*self.commands.link.hosts]
        self.commands.send("load", dtype.name, list(map(hosts.count, hosts)))

    def joined(self, loaded: LoadedModel) -> LoadedModel:
        nbytes = loaded.facts.weight_bytes
        hosts, others = self.commands.link.hosts, []
        for rank, (failure, facts, part_bytes, *memory) in enumerate(
            self.commands.request("loaded"), 1
        ):
            if failure:
                raise StartError(f"Rank {rank} ({hosts[rank]}) cannot load its part: {failure}")
            nbytes += part_bytes
            self.start_memory[rank] = RankMemory(*memory)
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
        return LeadingEngine(loaded, batches, self.commands, self._total)

    def layer_map(self, probe: list[Any]) -> LayerMap:
        layers = LeadingLayerMap(probe, self.commands)
        self.byte_share, self._last_memory = layers.byte_share, {}
        return layers

    def disk_thread(self, file_store: FileStore, queue_bytes: int) -> DiskThread:
        return lead_disk(self.commands, file_store, queue_bytes)

    def forward(self, forward: ForwardMemory) -> ForwardMemory:
        """Return the memory of a forward in which this rank computes its own heads only."""
        if self._split == "pipeline":
            return forward
        return dataclasses.replace(forward, pair_bytes=forward.pair_bytes // self._group.size())

    def limit(self, used: int) -> int:
        """See `SingleRank`. Between reports, the other ranks' use is assumed to grow with `used`.

        A report does not include requests admitted after it.
        """
        reported = self._reported_memory()
        if reported != self._last_memory:
            left = min(memory.limit_bytes - memory.used_bytes for memory in reported.values())
            self._last_memory, self._limit = reported, used + int(left / self.byte_share)
        return self._limit

    def _reported_memory(self) -> dict[int, RankMemory]:
        reported = dict(self.commands.link.rank_memory)  # 0 bytes until a rank has measured
        return self.start_memory | {
            rank: memory for rank, memory in reported.items() if memory.limit_bytes
        }

    def tidy(self) -> None:
        if self.commands.is_quiet():
            self.commands.send("release_memory")

    def report(self, used_bytes: int) -> dict[str, Any] | None:
        return rank_report(
            self.commands.link.hosts, self._split, used_bytes, self._reported_memory()
        )

    def end(self) -> None:
        if self._is_serving:  # otherwise a rank may still load for minutes
            self.commands.request(STOP)  # returns after all ranks have written their files
        self._close()

    def wait_for_rank_failure(self) -> None:
        self.commands.link.wait_for_failure()


def rank_report(
    hosts: Sequence[str], split: str, used_bytes: int, memory_by_rank: Mapping[int, RankMemory]
) -> dict[str, Any]:
    """Return the ranks for `/v1/cache`; rank 0 uses `used_bytes`, the others `memory_by_rank`."""
    ranks: list[dict[str, Any]] = [{"rank": 0, "host": hosts[0], "used_bytes": used_bytes}]
    for rank, host in enumerate(hosts[1:], 1):
        memory = memory_by_rank.get(rank, RankMemory(0, 0))
        entry = {"rank": rank, "host": host, "used_bytes": memory.used_bytes}
        ranks.append(entry | {"limit_bytes": memory.limit_bytes})
    return {"count": len(hosts), "split": split, "ranks": ranks, "off": dict(OFF)}
