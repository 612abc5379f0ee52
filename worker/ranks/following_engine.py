"""Computes on a follower's part of the model; its answers say what rank 0 says.

Owner: the thread that loaded the model.
"""

from collections.abc import Callable, Sequence as TypedSequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from hearth.worker.engine.decode.decoder import Decoder
from hearth.worker.engine.decode.decoding_sequence import Agree
from hearth.worker.engine.decode.tree_forward import TreeForward
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel

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
