"""Runs one of ranks 1 to N - 1 of a model: `python -m hearth.worker.ranks.follower_main`.

A follower carries out rank 0's operations on its part of the model and its KV. It has no scheduler,
no index and no clock, and decides nothing. Where an operation of the decoder needs a decision, the
follower does further operations until rank 0 sends the decision as `returned`.

Rank 0 starts the followers of its own machine; `hearth ranks join` starts those of other machines.
A follower ends when rank 0 is gone or when its standard input closes, even inside a collective.
"""

import signal

if __name__ == "__main__":  # before the imports below, which take seconds
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when a rank ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

import argparse
import dataclasses
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import mlx.core as mx

from hearth.shared.errors import EXIT_CANNOT_START, EXIT_RANK_LOST, StartError
from hearth.shared.logging_setup import configure
from hearth.shared.process_start import begin_process
from hearth.shared.settings import Settings
from hearth.shared.zmq_rank_port import RankContext
from hearth.worker.engine import mlx_lm_open_files  # noqa: F401  before all that imports mlx_lm

# isort: split
from mlx_lm.generate import generation_stream

from hearth.worker.cache.block_hash import PrefixHash, schema_root
from hearth.worker.disk.file_store import FileStore
from hearth.worker.disk.open_file_store import open_file_store
from hearth.worker.doctor.checked_machine import chip
from hearth.worker.engine import mlx_memory
from hearth.worker.engine.decode.batch_split import ReadCost
from hearth.worker.engine.decode.decoder import Decoder
from hearth.worker.engine.decode.decoding_sequence import Agree, DecodingSequence
from hearth.worker.engine.decode.sampler import SamplingParams
from hearth.worker.engine.decode.tree_forward import TreeForward
from hearth.worker.engine.engine import Engine, leave_device
from hearth.worker.engine.model_loader import LoadedModel, load_model, weights_of
from hearth.worker.engine.system_state import MemoryUse
from hearth.worker.kv.memory_release import release_memory
from hearth.worker.ranks.agreed_tokens import FollowingTokens, Sum, checksum, sum_over, token_facts
from hearth.worker.ranks.followed_kv import FollowedDisk, FollowedKV, OpenStore
from hearth.worker.ranks.follower_link import FollowerLink
from hearth.worker.ranks.rank_check import follow_check
from hearth.worker.ranks.rank_hosts import join_group
from hearth.worker.ranks.rank_link import RETURNED, STOP, Handle, Operation, RankLost
from hearth.worker.ranks.sharded_model import Sharded, model_facts
from hearth.worker.ranks.start_ranks import rank_keys, with_shared
from hearth.worker.setup.kv_setup import identify
from hearth.worker.setup.memory_setup import workers_limit

log = logging.getLogger("hearth.worker.ranks")

OTHER_REASON_S = 1.0  # time for rank 0 to find the rank that made a collective fail

Follow = Callable[[FollowerLink, Any, Settings], None]  # (link, group, settings)


def run_follower(serve: Follow) -> int:
    """Join rank 0, serve its operations with `serve` until it is gone; return the exit code."""
    parser = argparse.ArgumentParser(prog="hearth.worker.ranks.follower_main", description=__doc__)
    parser.add_argument("--leader", required=True, help="the endpoint of rank 0")
    parser.add_argument("--rank", type=int, help="left out: rank 0 knows it by its address")
    parser.add_argument("--address", default="", help="of this machine, to connect from")
    options = parser.parse_args()
    threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()
    try:
        settings = begin_process(_name(options.rank))
        keys = rank_keys(settings) if options.leader.startswith("tcp://") else None
        context = RankContext(keys, is_leader=False)
        link = FollowerLink(context, options.leader, options.address, _end)
        welcome = link.join(options.rank)
    except StartError as error:
        print(f"This rank cannot start: {error}", file=sys.stderr, flush=True)
        return EXIT_CANNOT_START
    except RankLost as error:
        _end(EXIT_RANK_LOST, str(error))
    configure(settings.log_level.upper(), _name(link.rank), settings.log_prompts)
    try:
        group = join_group(welcome.tensors, link.rank, link.size)
        how = serve if welcome.purpose == "serve" else follow_check
        how(link, group, with_shared(settings, welcome.settings))
    except StartError as error:
        link.fail(error)
    except Exception as error:
        log.exception("this rank broke")
        threading.Event().wait(OTHER_REASON_S)
        link.fail(error)
    return 0


def _name(rank: int | None) -> str:
    return "rank" if not rank else f"rank-{rank}"


def _end(code: int, why: str) -> NoReturn:
    """End this process, even if its main thread hangs in a collective."""
    log.info("this rank ends: %s", why)
    sys.stderr.flush()
    os._exit(code)


def _end_with_stdin() -> None:
    """End this process once its standard input closes, because its parent is gone."""
    while os.read(0, 4096):
        pass
    _end(0, "who started it is gone")


# ---------------------------------------------------------------- the computation


MEASURE_S: Final = 0.5

Handler = Callable[..., Any]  # (*arguments of an operation) -> its answer


class FollowerMemory:
    """Limits a follower to its part of its machine's memory, and reports its use to rank 0."""

    def __init__(self, settings: Settings, link: FollowerLink) -> None:
        self._settings = settings
        self._link = link
        self._use = MemoryUse()
        self._measured_at = 0.0
        self._limit = workers_limit(settings)

    def share(self, ranks_here: int) -> None:
        """Limit this rank to an equal part of the memory; each worker has `ranks_here` ranks."""
        parts = ranks_here * max(1, self._settings.workers)
        self._limit = workers_limit(self._settings) // parts
        mlx_memory.set_memory_limit(self._limit)

    def admit(self, nbytes: int) -> None:
        """Prepare the memory for weights of `nbytes`. Raises: StartError: they do not fit."""
        mlx_memory.refuse_heavy(nbytes, self._settings.model_path, self._limit)
        mlx_memory.wire(nbytes)

    def loaded(self, model: LoadedModel) -> None:
        mlx_memory.wire_loaded(weight.nbytes for weight in weights_of(model))
        self.measure()

    def measure(self, *, is_due: bool = False) -> None:
        """Measure the memory, at most every MEASURE_S unless `is_due`; a heartbeat reports it."""
        now = time.monotonic()
        if is_due or now - self._measured_at >= MEASURE_S:
            self._measured_at = now
            self._use.measure()
            self._link.set_memory(*self.limit_and_use())

    def limit_and_use(self) -> tuple[int, int]:
        """Return the bytes that this rank may use, and those that it uses."""
        return self._limit, self._use.bytes_used()


class Follower:
    """Carries out rank 0's operations on one follower. Owner: the main thread."""

    def __init__(
        self,
        link: FollowerLink,
        load: Callable[..., LoadedModel],
        total: Sum,
        memory: FollowerMemory,
        open_store: OpenStore,
    ) -> None:
        """`load` takes the arguments of operation "load". Both functions raise StartError."""
        self._link = link
        self._memory = memory
        self._load_part = load
        self._loaded: LoadedModel | None = None
        self._engine: FollowingEngine | None = None
        self._failure = ""  # why the part could not be loaded
        self._total = total
        self._returned_cache: list[Any] = []  # set while the decoder returns a cache
        self.kv = FollowedKV()
        self.disk = FollowedDisk(link, self.kv, open_store)
        self.operations: dict[str, Handler] = {
            "load": self._load,
            "loaded": self._report_loaded,
            "engine": self._make_engine,
            "new_cache": self._new_cache,
            "prefill": self._prefill,
            "cost": self._set_cost,
            "add": self._add,
            "step": self._step,
            "remove": self._remove,
            "given": self._take_returned_cache,
            "release_memory": self._release_memory,
            **self.kv.operations,
            **self.disk.operations,
        }

    def run(self) -> None:
        """Do operations until `stop`, on the same stream as rank 0."""
        with mx.stream(generation_stream):
            while (operation := self._link.next()).name != STOP:
                self._do(operation)
        self.disk.close()

    def _do(self, operation: Operation) -> None:
        self.kv.drop(operation.drops)
        answer = self.operations[operation.name](*operation.arguments)
        if operation.is_asked:
            self._link.answer(answer)
        self._memory.measure()

    def _until_returned(self) -> Any:
        """Do the operations that rank 0 sends inside an operation; return the `returned` value."""
        while (operation := self._link.next()).name != RETURNED:
            self._do(operation)
        self.kv.drop(operation.drops)
        (value,) = operation.arguments
        return value

    @property
    def engine(self) -> "FollowingEngine":
        assert self._engine is not None, "rank 0 makes its engine before it uses it"
        return self._engine

    def _release_memory(self) -> None:
        """Release unused memory, and measure: rank 0 may send no operation for a while."""
        release_memory()
        self._memory.measure(is_due=True)

    # ------------------------------------------------------------ start

    def _load(self, *how: Any) -> None:
        try:
            self._loaded = self._load_part(*how)
        except StartError as error:
            self._failure = str(error)  # rank 0 requests this text and shows it to the user

    def _report_loaded(self) -> list[Any]:
        """Return [failure, facts, bytes of the part, bytes this rank may use, bytes it uses].

        The failure is "" if the part was loaded.
        """
        loaded = self._loaded
        if loaded is None:
            return [self._failure, {}, 0, 0, 0]
        return ["", model_facts(loaded), loaded.facts.weight_bytes, *self._memory.limit_and_use()]

    def _make_engine(self, batches: bool) -> bool:
        tokens = FollowingTokens(self._link, self._total)
        assert self._loaded is not None, "rank 0 has asked for that"
        self._engine = FollowingEngine(self._loaded, batches, tokens, self._until_returned)
        return self.engine.decoder.is_mergeable

    def _new_cache(self, handle: Handle) -> None:
        self.kv.caches[handle] = self.engine.new_cache()

    def _prefill(self, handle: Handle, ids: list[int]) -> None:
        self._link.witness("prefill", handle, len(ids), checksum(ids))
        self.engine.prefill(self.kv.caches[handle], ids)

    # ------------------------------------------------------------ answers

    def _set_cost(self, fields: list[Any]) -> None:
        self.engine.decoder.cost = ReadCost(*fields)

    def _add(
        self, request_id: str, handle: Handle, count: int, tail: list[int], tokens_max: int
    ) -> None:
        """Add a sequence; a follower needs no ids of the `count` tokens before the tail."""
        self._link.witness("add", handle, count, checksum(tail))
        sequence = DecodingSequence(
            request_id=request_id,
            cache=self.kv.caches[handle],
            tokens=[0] * count,
            tail=tail,
            sampling=SamplingParams(no_tokens, (), None),
            tokens_max=tokens_max,
            before_forward=lambda _count: self._until_returned(),
            before_join=self._until_returned,
            join_bytes=self._until_returned,
            take_back=self._take_back,
        )
        self.engine.decoder.add(sequence)

    def _take_back(self, cache: list[Any]) -> None:
        self._returned_cache = cache
        self._until_returned()

    def _take_returned_cache(self, handle: Handle) -> None:
        self.kv.caches[handle], self._returned_cache = self._returned_cache, []

    def _step(self) -> None:
        sampled = self.engine.decoder.step()
        self._link.witness(*token_facts([token.token_id for token in sampled]))

    def _remove(self, request_id: str, kept: int | None, handle: Handle) -> None:
        left = self.engine.decoder.remove(request_id, kept)
        if left is not None:
            self.kv.caches[handle] = left.cache


AwaitReturned = Callable[[], Any]  # waits for rank 0's result and returns it


class FollowingEngine(Engine):
    """The engine of a follower. `agree` returns the tokens of each forward."""

    def __init__(
        self, loaded: LoadedModel, batches: bool, agree: Agree, await_returned: AwaitReturned
    ) -> None:
        self._agree = agree
        self._await_returned = await_returned
        super().__init__(loaded, batches)

    def _make_decoder(
        self, batches: bool, tree_forward: TreeForward | None, try_trunks: Callable[[], bool]
    ) -> Decoder:
        return FollowingDecoder(self._model, batches, self._agree, self._await_returned)


class FollowingDecoder(Decoder):
    """The decoder of a follower. Rank 0's results decide which requests share a forward."""

    def __init__(
        self, model: Any, is_mergeable: bool, agree: Agree, await_returned: AwaitReturned
    ) -> None:
        super().__init__(model, generation_stream, is_mergeable, agree=agree)
        self._await_returned = await_returned

    def _finds_room(self, nbytes: int) -> bool:
        return bool(self._await_returned())


def no_tokens(logprobs: mx.array, _positions: Sequence[int]) -> mx.array:
    """Return zeros: a follower samples no tokens but receives rank 0's."""
    return mx.zeros(logprobs.shape[:1], mx.uint32)


def make_follower(
    link: FollowerLink,
    group: mx.distributed.Group,
    settings: Settings,
    summing: Callable[[mx.distributed.Group], Sum] = sum_over,
) -> Follower:
    """Return a follower that does rank 0's operations on this rank's part of the model."""
    memory = FollowerMemory(settings, link)

    def load(dtype: str, ranks_here: Sequence[int]) -> LoadedModel:
        """Load this rank's part to compute in `dtype`, whatever this machine's chip prefers."""
        memory.share(ranks_here[link.rank])
        part = Sharded(group, settings.rank_split)
        name = functools.partial(identify, settings, lambda: False)
        meant = dataclasses.replace(settings, dtype=dtype)
        loaded = load_model(meant, admit=memory.admit, identify=name, part=part)
        memory.loaded(loaded)
        return loaded

    def open_store(root: PrefixHash, label: str, hosts: Sequence[str]) -> FileStore | None:
        return open_followed_store(settings, link.rank, root, label, hosts)

    return Follower(link, load, summing(group), memory, open_store)


def follow(link: FollowerLink, group: mx.distributed.Group, settings: Settings) -> None:
    """Do rank 0's operations until `stop`, leave the device, and wait for rank 0's end."""
    make_follower(link, group, settings).run()
    leave_device()
    link.answer(None)
    link.next()  # no operation comes: this process ends when rank 0 ends


def open_followed_store(
    settings: Settings, rank: int, root: PrefixHash, cut_label: str, hosts: Sequence[str]
) -> FileStore | None:
    """Return this rank's files for rank 0's `root`, or None if no KV is written.

    `hosts` are the ranks' hosts, in order. This rank's own root includes its number and chip, so
    that a file moved from another rank or machine is not accepted.

    Raises:
        StartError: the directory belongs to another user.
    """
    directory = settings.kv_cache_dir / f"rank-{rank}-of-{len(hosts)}"
    own_root = schema_root([root.hex(), f"rank {rank}", chip()])
    own = dataclasses.replace(settings, kv_cache_dir=directory)
    return open_file_store(own_root, own, cut_label, ranks_here=[*hosts].count(hosts[rank]))


if __name__ == "__main__":
    code = run_follower(follow)
    sys.stderr.flush()
    os._exit(code)  # threads that use MLX must not outlive the interpreter
