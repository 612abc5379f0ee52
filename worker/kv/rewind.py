"""Takes a live cache back to where it stood before a forward whose last tokens were not said.

Nothing is copied but the few rows of a branch, which move to where they belong. Else rows of
every token are cut, a window that a forward of several rows made anew loses its last rows, and a
state is the array that it was before. What a window or a state kept of single tokens is overwritten
in place, so that no more than one forward is taken back.
Owner: the inference thread.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx

from hearth.worker.kv.layer_adapters import STATES, WINDOWS, is_ring, kind_of, leaves

PLAIN: Final = "KVCache"  # whose rows can be moved


def can_rewind(cache: Sequence[Any]) -> bool:
    """Return whether every layer of a model's `cache` is of a kind that can be taken back."""
    return all(kind_of(leaf) is not None for leaf in leaves(cache))


class RewindPoint:
    """Where a live cache stands before a forward of several rows.

    It holds good until the next forward, and `cut` and `back` may follow each other meanwhile.
    """

    def __init__(self, cache: Sequence[Any]) -> None:
        self._leaves = list(leaves(cache))
        self._states = {
            number: list(leaf.cache)
            for number, leaf in enumerate(self._leaves)
            if kind_of(leaf) == STATES
        }
        self._windows = {
            number: (leaf.keys, leaf.values, leaf.offset, leaf._idx)
            for number, leaf in enumerate(self._leaves)
            if self._states and kind_of(leaf) == WINDOWS and is_ring(leaf)
        }

    @property
    def keeps_rows(self) -> bool:
        """Whether any number of the forward's rows can be cut: no layer keeps a state."""
        return not self._states

    def cut(self, rows: int) -> None:
        """Leave out the last `rows` of the forward, not all of it, which had two at least."""
        assert self.keeps_rows, "a state is of all rows"
        for leaf in self._leaves:
            _cut(leaf, rows)

    def pick(self, rows: int, path: Sequence[int]) -> None:
        """Leave of the forward's last `rows` only those of `path`, which ascends; not all are gone.

        Where that is not their beginning, every layer keeps plain rows.
        """
        assert list(path) == sorted(set(path)), path
        if list(path) != list(range(len(path))):
            _move(self._leaves, rows, path)
        self.cut(rows - len(path))

    def back(self, rows: int) -> None:
        """Leave out the whole forward, which had `rows`."""
        assert not self.keeps_rows, "rows are cut"
        for number, leaf in enumerate(self._leaves):
            if number in self._states:
                leaf.cache = list(self._states[number])
            elif number in self._windows:
                leaf.keys, leaf.values, leaf.offset, leaf._idx = self._windows[number]
            else:
                leaf.trim(rows)


def _move(layers: Sequence[Any], rows: int, path: Sequence[int]) -> None:
    """Move those of the last `rows` that `path` names to the front of them, in order."""
    assert all(type(leaf).__name__ == PLAIN for leaf in layers), "a branch is of plain rows"
    found = mx.array(list(path))
    moved = [
        tuple(
            mx.take(array[..., leaf.offset - rows : leaf.offset, :], found, axis=2)
            for array in (leaf.keys, leaf.values)
        )
        for leaf in layers
    ]
    # Evaluated first: a buffer that something lazy still reads is copied where it is written.
    mx.eval(moved)
    for leaf, (keys, values) in zip(layers, moved, strict=True):
        start = leaf.offset - rows
        leaf.keys[..., start : start + len(path), :] = keys
        leaf.values[..., start : start + len(path), :] = values


def _cut(leaf: Any, rows: int) -> None:
    if kind_of(leaf) != WINDOWS or not is_ring(leaf):
        taken = leaf.trim(rows)
        assert taken == rows, (type(leaf).__name__, taken, rows)
        return
    # A forward of n rows leaves n - 1 more than the window has, in order: what is cut is spare.
    held = leaf.keys.shape[2]
    assert leaf._idx == held > rows, (leaf._idx, held, rows)
    leaf.keys, leaf.values = leaf.keys[..., : held - rows, :], leaf.values[..., : held - rows, :]
    leaf.offset -= rows
    leaf._idx -= rows
