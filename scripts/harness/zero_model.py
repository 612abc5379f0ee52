"""Stands in for a model where what it says is scripted: it fills its caches with zeros."""

import dataclasses
from functools import cache
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from hearth.worker.engine.model_loader import LoadedModel
from scripts.harness.socketless_worker import loaded

Layers = Literal["dense", "hybrid", "windowed"]


class ZeroModel:
    """Has a layer that keeps rows, and beside it one that keeps a state or a window."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self.model = nn.Module()  # it has no weights

    def make_cache(self) -> list[Any]:
        others = {"hybrid": [ArraysCache(1)], "windowed": [RotatingKVCache(128)]}
        return [KVCache(), *others.get(self._layers, [])]

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        rows, count = ids.shape
        keys = mx.zeros((rows, 1, count, 1))
        for layer in cache:
            if hasattr(layer, "update_and_fetch"):
                layer.update_and_fetch(keys, keys)
            else:
                layer[0] = mx.zeros((rows, 8))
        return mx.zeros((rows, count, 2))  # logits, which nobody reads


@cache
def zero_model(layers: Layers) -> LoadedModel:
    """Return it in the place of a fixture's weights."""
    return dataclasses.replace(loaded("qwen3", tiny=True), model=ZeroModel(layers))
