"""Counts what a model is fed, and lets a test have it told something else."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from scripts.harness.socketless_worker import loaded

Caches = Sequence[Any]
Tell = Callable[[mx.array, Caches, dict[str, Any]], Caches]


class CountedModel:
    """A model that notes the shape (rows, tokens) of each forward.

    `tell` returns the caches that it is given for those of a forward, or raises; it may change what
    else the forward is given.
    """

    def __init__(self, model: Any, tell: Tell = lambda _ids, cache, _how: cache) -> None:
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


def counted(name: str) -> Any:
    """Return a fixture's `LoadedModel`, but that its model is a `CountedModel`."""
    plain = loaded(name)
    return dataclasses.replace(plain, model=CountedModel(plain.model))
