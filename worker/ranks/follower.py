"""Carries out what rank 0 tells, on this rank's part of the model and its KV.

A follower has no scheduler, no index and no clock: it decides nothing. Amid an operation of the
decoder it comes to a question that rank 0 has to answer; then it does what it is told until
`returned` comes. Owner: the thread that loaded the model.
"""

import time
from collections.abc import Callable, Sequence as TypedSequence
from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import generation_stream

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import Settings
from hearth.worker.engine import mlx_memory
from hearth.worker.engine.decode.batch_split import ReadCost
from hearth.worker.engine.decode.decoder import Decoder
from hearth.worker.engine.decode.decoding_sequence import Agree, Sequence
from hearth.worker.engine.decode.sampler import TokenChoice
from hearth.worker.engine.decode.tree_forward import TreeForward
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.footprint import MemoryUse
from hearth.worker.engine.model_loader import LoadedModel, weights_of
from hearth.worker.kv.return_freed_memory import release_memory
from hearth.worker.ranks.agreed_tokens import FollowingTokens, Sum, checksum, said_facts
from hearth.worker.ranks.disk.followed_disk import FollowedDisk, OpenStore
from hearth.worker.ranks.followed_kv import FollowedKV
from hearth.worker.ranks.loading.sharded_model import model_facts
from hearth.worker.ranks.rank_link import Handle, Operation
from hearth.worker.ranks.transport.follower_link import FollowerLink
from hearth.worker.setup.memory_setup import workers_limit

STOP: Final = "stop"
RETURNED: Final = "returned"
MEASURE_S: Final = 0.5

Do = Callable[..., Any]  # takes an operation's arguments; returns the answer, where one is asked


class FollowerMemory:
    """Holds a follower to its part of its machine, and tells rank 0 what is left of that."""

    def __init__(self, settings: Settings, link: FollowerLink) -> None:
        self._settings = settings
        self._link = link
        self._use = MemoryUse()
        self._measured_at = 0.0
        self._limit = workers_limit(settings)

    def share(self, ranks_here: int) -> None:
        """So many ranks of each worker are on this machine, and have equal parts of its memory."""
        parts = ranks_here * max(1, self._settings.workers)
        self._limit = workers_limit(self._settings) // parts
        mlx_memory.hold_memory(self._limit)

    def admit(self, nbytes: int) -> None:
        """Make ready for weights of `nbytes`. Raises: StartError, where they do not fit."""
        mlx_memory.refuse_heavy(nbytes, self._settings.model_path, self._limit)
        mlx_memory.wire(nbytes)

    def loaded(self, model: LoadedModel) -> None:
        mlx_memory.wire_loaded(one.nbytes for one in weights_of(model))
        self.measure()

    def measure(self, *, is_due: bool = False) -> None:
        """Look at the process, where the last look is some time ago; rank 0 is told later."""
        now = time.monotonic()
        if is_due or now - self._measured_at >= MEASURE_S:
            self._measured_at = now
            self._use.measure()
            self._link.set_room(*self.room())

    def room(self) -> tuple[int, int]:
        """Return the bytes that this rank may take, and those that it takes."""
        return self._limit, self._use.bytes_used()


class Follower:
    """One of ranks 1 and up."""

    def __init__(
        self,
        link: FollowerLink,
        load: Callable[..., LoadedModel],
        total: Sum,
        memory: FollowerMemory,
        open_store: OpenStore,
    ) -> None:
        """`load` is called with what `load` is told with; it and `open_store` raise StartError."""
        self._link = link
        self._memory = memory
        self._load_part = load
        self._loaded: LoadedModel | None = None
        self._engine: FollowingEngine | None = None
        self._failure = ""  # to load
        self._total = total
        self._given: list[Any] = []  # the cache that the decoder gives back, amid its operation
        self.kv = FollowedKV()
        self.disk = FollowedDisk(link, self.kv, open_store)
        self.operations: dict[str, Do] = {
            "load": self._load,
            "loaded": self._tell_loaded,
            "engine": self._make_engine,
            "new_cache": self._new_cache,
            "prefill": self._prefill,
            "cost": self._set_cost,
            "add": self._add,
            "step": self._step,
            "remove": self._remove,
            "given": self._take_given,
            "release_memory": self._release_memory,
            **self.kv.operations,
            **self.disk.operations,
        }

    def run(self) -> None:
        """Do as told until `stop`, on the stream that rank 0 computes on too."""
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
        """Do what rank 0 does amid an operation; return what that gave."""
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
        """Give up what is gone. Nothing is told for a while: what rank 0 hears now has to hold."""
        release_memory()
        self._memory.measure(is_due=True)

    # ------------------------------------------------------------ start

    def _load(self, *how: Any) -> None:
        try:
            self._loaded = self._load_part(*how)
        except StartError as error:
            self._failure = str(error)  # rank 0 asks for it, and tells the user

    def _tell_loaded(self) -> list[Any]:
        """Return why the part could not be loaded; else what it is, and three numbers of bytes.

        Those of the part, those that this rank may take, and those that it takes.
        """
        loaded = self._loaded
        if loaded is None:
            return [self._failure, {}, 0, 0, 0]
        return ["", model_facts(loaded), loaded.facts.weight_bytes, *self._memory.room()]

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

    def _add(self, key: str, handle: Handle, count: int, tail: list[int], tokens_max: int) -> None:
        """Take in a sequence. Of its `count` tokens before the tail nobody here needs the ids."""
        self._link.witness("add", handle, count, checksum(tail))
        sequence = Sequence(
            key=key,
            cache=self.kv.caches[handle],
            tokens=[0] * count,
            tail=tail,
            choice=TokenChoice(no_tokens, (), None),
            tokens_max=tokens_max,
            before_forward=lambda _count: self._until_returned(),
            before_join=self._until_returned,
            join_bytes=self._until_returned,
            take_back=self._take_back,
        )
        self.engine.decoder.add(sequence)

    def _take_back(self, cache: list[Any]) -> None:
        self._given = cache
        self._until_returned()

    def _take_given(self, handle: Handle) -> None:
        self.kv.caches[handle], self._given = self._given, []

    def _step(self) -> None:
        sampled = self.engine.decoder.step()
        self._link.witness(*said_facts([one.token_id for one in sampled]))

    def _remove(self, key: str, said: int | None, handle: Handle) -> None:
        left = self.engine.decoder.remove(key, said)
        if left is not None:
            self.kv.caches[handle] = left.cache


Ask = Callable[[], Any]  # waits for what rank 0 gave to the question that comes now


class FollowingEngine(Engine):
    """The engine of a follower. `agree` gives each forward's tokens."""

    def __init__(self, loaded: LoadedModel, batches: bool, agree: Agree, ask: Ask) -> None:
        self._agree = agree
        self._ask = ask
        super().__init__(loaded, batches)

    def _make_decoder(
        self, batches: bool, tree_forward: TreeForward | None, try_trunks: Callable[[], bool]
    ) -> Decoder:
        return FollowingDecoder(self._model, batches, self._agree, self._ask)


class FollowingDecoder(Decoder):
    """The decoder of a follower. Who shares a forward follows from what rank 0 was asked."""

    def __init__(self, model: Any, is_mergeable: bool, agree: Agree, ask: Ask) -> None:
        super().__init__(model, generation_stream, is_mergeable, agree=agree)
        self._ask = ask

    def _finds_room(self, nbytes: int) -> bool:
        return bool(self._ask())


def no_tokens(logprobs: mx.array, _places: TypedSequence[int]) -> mx.array:
    """Choose nothing: where a follower's row has a token, rank 0's comes."""
    return mx.zeros(logprobs.shape[:1], mx.uint32)
