"""Layers with recurrent states: upstream's ArraysCache (Mamba, gated delta net), and Z1TCache."""

from typing import Any, Final

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


Z1T_ARRAYS: Final = ("cum_eKV", "cum_eK", "win_eKV", "win_eK")


class Z1TKind(LayerKind):
    """Running sums and the last values of a convolution (Z1T), in fields of their own."""

    def nbytes(self, leaf: Any) -> int:
        return sum(array.nbytes for array in self.state(leaf) if array is not None)

    def state(self, leaf: Any) -> StateArrays:
        return tuple(getattr(leaf, name) for name in Z1T_ARRAYS)

    def put_state(self, leaf: Any, arrays: StateArrays, position: int) -> None:
        for name, array in zip(Z1T_ARRAYS, arrays, strict=True):
            setattr(leaf, name, array)
        leaf.offset = position

    def checkpoint(self, leaf: Any) -> Any:
        return self.state(leaf), leaf.offset

    def back(self, leaf: Any, saved: Any, rows: int) -> None:
        self.put_state(leaf, *saved)
