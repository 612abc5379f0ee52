"""Counts what a model is fed, and lets a test have some forwards fail."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from hearth.worker.engine.decode.shared_trunk import TrunkedKVCache
from scripts.harness.socketless_worker import loaded as plain


class CountedModel:
    """A model that notes the shape (rows, tokens) of each forward."""

    def __init__(self, model: Any, raises_on: Callable[[Sequence[Any]], bool]) -> None:
        self.model = model  # its upstream module, as a checkpoint's of vision has it too
        self.forwards: list[tuple[int, int]] = []
        self._raises_on = raises_on

    @property
    def tokens(self) -> int:
        return sum(rows * tokens for rows, tokens in self.forwards)

    def __call__(self, ids: mx.array, cache: Sequence[Any], **how: Any) -> mx.array:
        self.forwards.append((ids.shape[0], ids.shape[1]))
        if self._raises_on(cache):
            raise ValueError("it cannot")
        logits: mx.array = self.model(ids, cache=cache, **how)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def counted(name: str, raises_on: Callable[[Sequence[Any]], bool] = lambda _cache: False) -> Any:
    """Return a fixture as it is loaded, but that its model counts; forwards with such caches fail.

    It is a `LoadedModel` whose `model` is a `CountedModel`.
    """
    loaded = plain(name)
    return dataclasses.replace(loaded, model=CountedModel(loaded.model, raises_on))


def is_on_trunk(cache: Sequence[Any]) -> bool:
    return any(isinstance(layer, TrunkedKVCache) for layer in cache)
