"""Layers with recurrent states: upstream's ArraysCache (Mamba, gated delta net, convolutions)."""

from typing import Any

from hearth.worker.kv.layer_kinds.layer_kind import LayerKind, StateArrays


class StateKind(LayerKind):
    """Recurrent states. The layer replaces its arrays and never writes to them."""

    def depth(self, leaf: Any) -> int | None:
        return None

    def state(self, leaf: Any) -> StateArrays:
        return tuple(leaf.cache)

    def put_state(self, leaf: Any, arrays: StateArrays, position: int) -> None:
        assert len(arrays) == len(leaf.cache), (len(arrays), len(leaf.cache))
        leaf.cache = list(arrays)

    def checkpoint(self, leaf: Any) -> Any:
        return list(leaf.cache)

    def back(self, leaf: Any, saved: Any, rows: int) -> None:
        leaf.cache = list(saved)
