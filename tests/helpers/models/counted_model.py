"""Counts what a model is fed, and lets a test have it told something else, or fail."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from hearth.worker.engine.decode.shared_trunk import TrunkedKVCache
from scripts.harness.socketless_worker import loaded as plain

Caches = Sequence[Any]


class CountedModel:
    """A model that notes the shape (rows, tokens) of each forward.

    `tell` returns the caches that it is given for those of a forward, or raises; it may change what
    else the forward is given.
    """

    def __init__(
        self, model: Any, tell: Callable[[mx.array, Caches, dict[str, Any]], Caches]
    ) -> None:
        self.model = model  # its upstream module, as a checkpoint's of vision has it too
        self.forwards: list[tuple[int, int]] = []
        self._tell = tell

    @property
    def tokens(self) -> int:
        return sum(rows * tokens for rows, tokens in self.forwards)

    def __call__(self, ids: mx.array, cache: Caches, **how: Any) -> mx.array:
        self.forwards.append((ids.shape[0], ids.shape[1]))
        logits: mx.array = self.model(ids, cache=self._tell(ids, cache, how), **how)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def counted(name: str, raises_on: Callable[[Caches], bool] = lambda _cache: False) -> Any:
    """Return a fixture as it is loaded, but that its model counts; forwards with such caches fail.

    It is a `LoadedModel` whose `model` is a `CountedModel`.
    """

    def tell(_ids: mx.array, cache: Caches, _how: dict[str, Any]) -> Caches:
        if raises_on(cache):
            raise ValueError("it cannot")
        return cache

    loaded = plain(name)
    return dataclasses.replace(loaded, model=CountedModel(loaded.model, tell))


def is_on_trunk(cache: Caches) -> bool:
    return any(isinstance(layer, TrunkedKVCache) for layer in cache)
