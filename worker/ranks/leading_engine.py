"""Has every rank compute what rank 0 computes: forwards of prompts and steps of answers.

Rank 0 decides: what a follower would ask its scheduler or its KV manager amid an operation, it
waits to be told. Whatever that makes rank 0 do is told before the answer, `returned`.
Owner: the inference thread.
"""

import dataclasses
from collections.abc import Callable, Sequence as TypedSequence
from typing import Any

from mlx_lm.generate import generation_stream

from hearth.shared.errors import StartError
from hearth.worker.cache.image_keys import ImageRun
from hearth.worker.engine.decode.batch_split import ReadCost
from hearth.worker.engine.decode.decoder import Decoder
from hearth.worker.engine.decode.decoding_sequence import (
    SampledToken,
    Sequence,
)
from hearth.worker.engine.decode.tree_forward import TreeForward
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.ranks.agreed_tokens import LeadingTokens, Sum, check_sums, checksum, said_facts
from hearth.worker.ranks.named_kv import Telling, handle_of
from hearth.worker.ranks.rank_link import Value


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
        images: TypedSequence[ImageRun] = (),
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

    def add(self, sequence: Sequence) -> None:
        assert sequence.drafter is None and sequence.adapter is None and not sequence.shift
        cache, count = handle_of(sequence.cache), len(sequence.tokens)
        tail = list(map(int, sequence.tail))
        self._telling.tell("add", sequence.key, cache, count, tail, sequence.tokens_max)
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

    def remove(self, key: str, said: int | None = None) -> Sequence | None:
        """See `Decoder.remove`; the cache that is left has a new number, wherever it was before."""
        handle = self._telling.new_handle()
        self._telling.tell("remove", key, said, handle)
        left = super().remove(key, said)
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
            self._telling.tell("returned", value)
            return value

        return run

    def _naming(self, take_back: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        """Return what gives `take_back` a cache that all ranks know by a number."""

        def run(layers: list[Any]) -> None:
            cache = self._telling.cache(layers)
            self._telling.tell("given", cache.handle)
            take_back(cache)

        return run
