"""Reads and writes the rows and states of each kind of cache layer, and takes forwards back.

The kind of a layer follows from the name of its cache's class: mlx-lm and mlx-vlm have separate
classes of the same names. Only this module uses the attributes keys, values, offset, _idx and cache
of these classes; `engine/vision/vlm_language_model.py` reads the offset too.
Owner: the inference thread.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import mlx.core as mx

from hearth.worker.cache.extent_store import Layout
from hearth.worker.disk.file_format import Record
from hearth.worker.kv.quantise_kv import (
    KVRows,
    LayerRows,
    LayerStates,
    PackedFormat,
    QuantFormat,
    put_rows,
    rows_of,
)
from hearth.worker.kv.serialise_kv import rows_from, state_from

STEP = 256  # buffers are rounded up to a multiple of this many rows, as in mlx-lm
UNBOUNDED = 1 << 40  # tokens: capacity of a cache in which no layer keeps rows
GROWTH = 1.25  # least factor by which a small buffer grows, so that copies stay rare

ROWS, WINDOWS, STATES = "rows", "windows", "states"
# The kind of each cache class. A new class with the attributes of one of these kinds is registered
# in this table only.
KINDS: Final = {
    "KVCache": ROWS,
    "QuantizedKVCache": ROWS,
    "RotatingKVCache": WINDOWS,
    "ChunkedKVCache": WINDOWS,
    "ArraysCache": STATES,
    "MambaCache": STATES,
}


PLAIN: Final = "KVCache"  # the class with rows that can be moved


class UnknownCache(Exception):
    """A layer's cache is of a class or shape that this module cannot read and write."""


class LayerMap:
    """Reads and writes the caches of one model. `probe` is a cache that has seen some tokens.

    The map holds no cache. `has_room(nbytes)` says whether `nbytes` may be allocated: if not, a
    buffer that is too small grows only as much as needed. Owner: the inference thread.

    Raises:
        UnknownCache: no reuse is possible with this model.
    """

    def __init__(self, probe: list[Any]) -> None:
        self.has_room: Callable[[int], bool] = lambda _nbytes: True
        for leaf in leaves(probe):
            _check(leaf)
        rows, windows = _of_kind(probe, ROWS), _of_kind(probe, WINDOWS)
        states = _of_kind(probe, STATES)
        self._shapes = [_shapes(leaf) for leaf in rows]
        self._window_sizes = [_size(leaf) for leaf in windows]
        self._window_shapes = [_shapes(leaf) for leaf in windows]
        self._states = [[_kind_of_part(a) for a in leaf.cache] for leaf in states]
        if len(set(self._window_sizes)) > 1:
            raise UnknownCache(f"windows of several sizes ({self._window_sizes})")
        window_rows = [array for leaf in windows for array in rows_of(leaf).arrays]
        self._window_row_bytes = sum(array.nbytes // array.shape[2] for array in window_rows)
        self._one_row = tuple(rows_of(leaf).part(0, 1) for leaf in rows)
        self._row_costs: dict[PackedFormat | None, tuple[int, int]] = {}
        self.row_bytes = self.row_cost(None)[0]
        self.window_buffers = 2 * len(windows)
        self.state_bytes = LayerStates(tuple(tuple(leaf.cache) for leaf in states)).nbytes
        self.state_buffers = sum(len(leaf.cache) for leaf in states)
        self.layout = Layout(
            has_state=bool(states),
            window=max(self._window_sizes, default=0),
            has_rows=bool(rows),
        )

    def row_cost(self, form: PackedFormat | None) -> tuple[int, int]:
        """Return the bytes of one token's rows in `form`, and the number of their arrays."""
        if form not in self._row_costs:
            kept = KVRows(tuple(rows.converted(form) for rows in self._one_row))
            self._row_costs[form] = kept.nbytes, kept.buffers
        return self._row_costs[form]

    def packs(self, form: PackedFormat) -> bool:
        """Return whether the rows of any layer can be packed in `form`."""
        return any(form.fits(rows.arrays) for rows in self._one_row)

    @property
    def row_widths(self) -> list[int]:
        """The distinct widths of the rows in layers that keep every token."""
        return sorted({array.shape[-1] for rows in self._one_row for array in rows.arrays})

    @property
    def row_dtypes(self) -> list[mx.Dtype]:
        """The distinct types of the rows in layers that keep every token."""
        return list(dict.fromkeys(a.dtype for rows in self._one_row for a in rows.arrays))

    def are_rows(self, kept: KVRows, tokens: int) -> bool:
        """Return whether `kept` has this model's rows of `tokens` tokens, packed or not."""
        return _are_rows(kept, self._shapes, tokens)

    def are_window_rows(self, kept: KVRows, tokens_max: int) -> bool:
        """Return whether `kept` has this model's window rows of at most `tokens_max` tokens."""
        if not kept.layers or kept.formats != {None}:
            return False
        keys = kept.layers[0].arrays[0]
        tokens = keys.shape[2] if keys.ndim == len("bhtd") else 0
        return 0 < tokens <= tokens_max and _are_rows(kept, self._window_shapes, tokens)

    def is_state(self, kept: LayerStates) -> bool:
        """Return whether `kept` is a snapshot of this model; parts not yet created may be None."""
        found = [[_kind_of_part(part) for part in layer] for layer in kept.layers]
        return len(found) == len(self._states) and all(
            len(parts) == len(own)
            and all(
                None in (part, own_part) or part == own_part
                for part, own_part in zip(parts, own, strict=True)
            )
            for parts, own in zip(found, self._states, strict=True)
        )

    def window_bytes(self, tokens: int) -> int:
        return tokens * self._window_row_bytes

    def slot_bytes(self, rows: int, form: QuantFormat | None) -> int:
        """Return the bytes of a live cache with room for `rows` tokens."""
        return rounded(rows) * self.row_cost(form)[0] + self.unwritten_bytes(rows)

    def unwritten_bytes(self, rows: int) -> int:
        """Return the part of `slot_bytes` that the first write allocates: windows and states."""
        return self.window_bytes(min(rows, self.layout.window)) + self.state_bytes

    def depth(self, cache: list[Any]) -> int | None:
        """Return how many tokens the layers hold by their own count; None if no layer counts."""
        counted = next((leaf for leaf in leaves(cache) if hasattr(leaf, "offset")), None)
        return None if counted is None else int(counted.offset)

    def nbytes(self, cache: list[Any]) -> int:
        """Return the bytes of a live cache, spare capacity included."""
        return sum(leaf.nbytes for leaf in leaves(cache) if not leaf.empty())

    # ------------------------------------------------------------ rows of every token

    def rows(self, cache: list[Any], start: int, end: int) -> tuple[LayerRows, ...]:
        """Return views of the rows [start, end). A view keeps the whole buffer alive."""
        return tuple(rows_of(leaf).part(start, end) for leaf in _of_kind(cache, ROWS))

    def kept_rows(self, kept: KVRows, tokens: int | None = None) -> tuple[LayerRows, ...]:
        """Return views of the first `tokens` kept rows; None = all rows."""
        if tokens is None:
            return kept.layers
        return tuple(rows.part(0, tokens) for rows in kept.layers)

    def copy_rows(
        self, cache: list[Any], start: int, end: int, form: PackedFormat | None
    ) -> KVRows:
        """Return copies of the rows [start, end); raw rows are packed in `form`."""
        assert 0 <= start < end, (start, end)
        views = self.rows(cache, start, end)
        if form is not None:
            views = tuple(v.converted(form) if v.format is None else v for v in views)
        return _evaluated(views)

    def put_rows(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int, rows: int
    ) -> None:
        """Fill an empty cache with the rows of `position` tokens; leave room for `rows` in all."""
        for number, leaf in enumerate(_of_kind(cache, ROWS)):
            form = _format(leaf)
            layer = [run[number].converted(form) for run in row_runs]
            spare, arrays = max(rows, position) - position, []
            for parts in zip(*(run.arrays for run in layer), strict=True):
                count = sum(part.shape[2] for part in parts)
                assert count == position, (count, position)
                arrays.append(_joined(parts, spare))
            put_rows(leaf, LayerRows(tuple(arrays), layer[0].format))
            leaf.offset = position
            mx.eval(arrays)

    def reserve(self, cache: list[Any], rows: int) -> int:
        """Give every layer room for `rows` tokens; return the number of tokens that fit.

        Writes then stay in place.
        """
        room, wanted = UNBOUNDED, 0
        for shapes, leaf in zip(self._shapes, _of_kind(cache, ROWS), strict=True):
            if leaf.keys is None:
                tokens = rounded(rows)
                empty = tuple(
                    mx.zeros((*shape[:2], tokens, shape[3]), dtype) for shape, dtype in shapes
                )
                put_rows(leaf, LayerRows(empty).converted(_format(leaf)))
                leaf.offset = 0
                mx.eval(rows_of(leaf).arrays)  # counted by MLX before the next admission
                room = min(room, tokens)
                continue
            old = rows_of(leaf)
            capacity = old.arrays[0].shape[2]
            if capacity >= rows:
                room = min(room, capacity)
                continue
            wanted = wanted or self._grown(capacity, rows, old.format)
            room, used = min(room, wanted), old.part(0, leaf.offset).arrays
            arrays = [_joined([array], wanted - leaf.offset) for array in used]
            put_rows(leaf, LayerRows(tuple(arrays), old.format))
            del old, used
            mx.eval(arrays)
        assert room >= rows, (room, rows)
        return room

    def _grown(self, capacity: int, rows: int, form: PackedFormat | None) -> int:
        """Return the new capacity, in tokens, of a buffer that is too small for `rows`."""
        roomy = rounded(max(rows, int(capacity * GROWTH)))
        more = (roomy - capacity) * self.row_cost(form)[0]
        return roomy if self.has_room(more) else rounded(rows)

    def quantise(self, cache: list[Any], form: QuantFormat) -> None:
        """Replace the layers in `cache` by quantised layers with the same rows, in `form`."""
        for index, layer in enumerate(cache):
            if type(layer).__name__ == "KVCache":
                cache[index] = layer.to_quantized(group_size=form.group_size, bits=form.bits)
                if cache[index].keys is not None:
                    put_rows(cache[index], rows_of(cache[index]))
                    mx.eval(cache[index].keys, cache[index].values)

    def trim(self, cache: list[Any], position: int) -> None:
        """Forget the rows after `position`. The caller then puts windows and states back."""
        for leaf in _of_kind(cache, ROWS):
            assert leaf.offset >= position, (leaf.offset, position)
            leaf.offset = position

    # ------------------------------------------------------------ windows

    def copy_window(self, cache: list[Any], tokens: int, behind: int = 0) -> KVRows:
        """Return the window layers' rows of the last `tokens` tokens, oldest first.

        The rows of the last `behind` tokens are left out.
        """
        assert 0 <= behind < tokens, (behind, tokens)
        newest = []
        for leaf in _of_kind(cache, WINDOWS):
            rows = LayerRows(tuple(_in_order(leaf, array) for array in (leaf.keys, leaf.values)))
            count = rows.arrays[0].shape[2]
            assert count >= tokens, (count, tokens)
            newest.append(rows.part(count - tokens, count - behind))
        return _evaluated(newest)

    def window_held(self, cache: list[Any]) -> int:
        """Return for how many of the last tokens every window layer has rows."""
        windows = _of_kind(cache, WINDOWS)
        return min((min(_held(leaf), _size(leaf)) for leaf in windows), default=0)

    def put_window(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int
    ) -> None:
        """Fill the window layers with the last rows of `row_runs`, which end at `position`.

        A whole window is filled: with one row fewer, MLX's next single-token step fails.
        """
        for number, leaf in enumerate(_of_kind(cache, WINDOWS)):
            wanted = min(position, _size(leaf))
            layer = [run[number].converted(None).arrays for run in row_runs]
            joined = [mx.concatenate(list(parts), axis=2) for parts in zip(*layer, strict=True)]
            count = joined[0].shape[2]
            assert count >= wanted, (count, wanted)
            arrays = [mx.contiguous(rows[..., count - wanted :, :]) for rows in joined]
            leaf.keys, leaf.values = arrays
            leaf.offset = position
            if is_ring(leaf):
                leaf._idx = wanted
            else:
                leaf.start_position = position - wanted
            mx.eval(arrays)

    # ------------------------------------------------------------ states

    def take_state(self, cache: list[Any]) -> LayerStates:
        """Return the current states without a copy: a later forward makes new arrays."""
        layers = tuple(
            tuple(None if array is None else mx.contiguous(array) for array in leaf.cache)
            for leaf in _of_kind(cache, STATES)
        )
        mx.eval(layers)
        return LayerStates(layers)

    def put_state(self, cache: list[Any], state: LayerStates) -> None:
        for leaf, arrays in zip(_of_kind(cache, STATES), state.layers, strict=True):
            assert len(arrays) == len(leaf.cache), (len(arrays), len(leaf.cache))
            leaf.cache = list(arrays)

    # ------------------------------------------------------------ records from disk

    def rows_from(self, record: Record) -> KVRows:
        """Return the evaluated rows or window rows of a record.

        Raises:
            UnreadableRecord: the arrays are not rows, or not in the format that their names say.
        """
        return rows_from(record.arrays)

    def state_from(self, record: Record) -> LayerStates:
        """Return the evaluated snapshot of a record.
        Raises:
            UnreadableRecord: the arrays are not a snapshot.
        """
        return state_from(record.arrays)


def leaves(cache: Sequence[Any]) -> Iterator[Any]:
    """Yield the layers' caches; in place of a composite cache, yield its parts."""
    for layer in cache:
        children = getattr(layer, "caches", None)
        if children is None:
            yield layer
        else:
            yield from leaves(children)


def kind_of(leaf: Any) -> str | None:
    """Return the kind of a layer's cache; None where its class is not known."""
    return KINDS.get(type(leaf).__name__)


def _of_kind(cache: list[Any], kind: str) -> list[Any]:
    return [leaf for leaf in leaves(cache) if kind_of(leaf) == kind]


def _check(leaf: Any) -> None:
    name, kind = type(leaf).__name__, kind_of(leaf)
    if kind is None:
        raise UnknownCache(name)
    if kind == WINDOWS and is_ring(leaf) and leaf.keep:
        raise UnknownCache(f"{name} that keeps its first {leaf.keep} tokens")
    if kind != STATES and (leaf.keys is None or leaf.offset == 0):
        raise UnknownCache(f"{name} that the model does not fill")


def raw_rows(leaf: Any) -> tuple[mx.array, mx.array] | None:
    """Return views of a layer's K and V rows of the last tokens, oldest first.

    None where the rows are packed. A view keeps the whole live buffer alive.
    """
    if kind_of(leaf) == WINDOWS:
        return _in_order(leaf, leaf.keys), _in_order(leaf, leaf.values)
    rows = rows_of(leaf).part(0, leaf.offset)
    return None if rows.format is not None else (rows.arrays[0], rows.arrays[1])


def is_ring(leaf: Any) -> bool:
    """Whether a window layer is a ring buffer. Chunked layers (Llama 4) drop old rows instead."""
    return hasattr(leaf, "max_size")


def _size(leaf: Any) -> int:
    """Return how many tokens a window layer looks back."""
    return int(leaf.max_size if is_ring(leaf) else leaf.chunk_size)


def _held(leaf: Any) -> int:
    """Return how many of the last tokens have rows in a window layer for certain."""
    if is_ring(leaf):
        return min(int(leaf.offset), _size(leaf))
    return int(leaf.offset - leaf.start_position)


def _format(leaf: Any) -> QuantFormat | None:
    bits = getattr(leaf, "bits", None)
    return None if bits is None else QuantFormat(bits, leaf.group_size)


def _shapes(leaf: Any) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    return [(array.shape, array.dtype) for array in rows_of(leaf).arrays]


def _are_rows(
    kept: KVRows, shapes: Sequence[list[tuple[tuple[int, ...], mx.Dtype]]], tokens: int
) -> bool:
    """Return whether `kept` has rows of `tokens` tokens that fit layers with these shapes."""
    if len(kept.layers) != len(shapes):
        return False
    found = [part for rows in kept.layers for part in zip(rows.shapes, rows.dtypes, strict=True)]
    expected = [part for layer in shapes for part in layer]
    return found == [((*shape[:2], tokens, shape[3]), dtype) for shape, dtype in expected]


def _kind_of_part(array: mx.array | None) -> tuple[tuple[int, ...], mx.Dtype] | None:
    return None if array is None else (array.shape, array.dtype)


def rounded(rows: int) -> int:
    """Return the capacity in tokens of a new buffer for `rows`."""
    return -(-rows // STEP) * STEP


def _joined(parts: Sequence[mx.array], spare: int) -> mx.array:
    """Return the concatenated rows, with room for `spare` more. Lazy."""
    batch, heads, _, width = parts[0].shape
    return mx.concatenate([*parts, mx.zeros((batch, heads, spare, width), parts[0].dtype)], axis=2)


def _in_order(leaf: Any, array: mx.array) -> mx.array:
    """Return the rows of a window that were written, oldest first."""
    rows = array.shape[2]
    if not is_ring(leaf):
        return array[..., : _held(leaf), :]
    if leaf._idx == rows:
        return array
    if leaf._idx < leaf.offset:
        return mx.concatenate([array[..., leaf._idx :, :], array[..., : leaf._idx, :]], axis=2)
    return array[..., : leaf._idx, :]


def _evaluated(views: Sequence[LayerRows]) -> KVRows:
    """Return copies of the rows: a view would keep the whole live buffer alive."""
    kept = tuple(
        LayerRows(tuple(mx.contiguous(a) for a in rows.arrays), rows.format) for rows in views
    )
    mx.eval([array for rows in kept for array in rows.arrays])
    return KVRows(kept)


# ---------------------------------------------------------------- taking a forward back


def can_rewind(cache: Sequence[Any]) -> bool:
    """Return whether a forward can be taken back in every layer of a model's `cache`."""
    return all(kind_of(leaf) is not None for leaf in leaves(cache))


class RewindPoint:
    """The state of a live cache before a forward of several rows, to take the forward back.

    A point is valid until the next forward; until then `cut` and `back` may both be called, in any
    order. Layers with rows of every token lose their last rows. Window layers do too: the forward
    of several rows made a longer array. A state layer gets the earlier array back. Only the rows of
    a branch are copied, to their new positions. A forward of one row overwrites a window in place,
    so that at most one forward can be taken back.
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
        """Remove the last `rows` of the forward, which had more rows than that."""
        assert self.keeps_rows, "a state can't be taken back by some rows"
        for leaf in self._leaves:
            _cut(leaf, rows)

    def pick(self, rows: int, path: Sequence[int]) -> None:
        """Of the forward's last `rows`, keep only those in `path`, which ascends.

        `path` is not empty. Unless `path` is the beginning of the rows, every layer is PLAIN.
        """
        assert list(path) == sorted(set(path)), path
        if list(path) != list(range(len(path))):
            _move(self._leaves, rows, path)
        self.cut(rows - len(path))

    def back(self, rows: int) -> None:
        """Take back the whole forward, which had `rows` rows."""
        assert not self.keeps_rows, "no layer keeps a state: call cut"
        for number, leaf in enumerate(self._leaves):
            if number in self._states:
                leaf.cache = list(self._states[number])
            elif number in self._windows:
                leaf.keys, leaf.values, leaf.offset, leaf._idx = self._windows[number]
            else:
                leaf.trim(rows)


def _move(layers: Sequence[Any], rows: int, path: Sequence[int]) -> None:
    """Move the rows in `path` to the beginning of the last `rows`, in order."""
    assert all(type(leaf).__name__ == PLAIN for leaf in layers), "a branch is of plain rows"
    found = mx.array(list(path))
    moved = [
        tuple(
            mx.take(array[..., leaf.offset - rows : leaf.offset, :], found, axis=2)
            for array in (leaf.keys, leaf.values)
        )
        for leaf in layers
    ]
    # Evaluated first: MLX copies a buffer at a write if an unevaluated array still reads from it.
    mx.eval(moved)
    for leaf, (keys, values) in zip(layers, moved, strict=True):
        start = leaf.offset - rows
        leaf.keys[..., start : start + len(path), :] = keys
        leaf.values[..., start : start + len(path), :] = values


def _cut(leaf: Any, rows: int) -> None:
    if kind_of(leaf) != WINDOWS or not is_ring(leaf):
        trimmed = leaf.trim(rows)
        assert trimmed == rows, (type(leaf).__name__, trimmed, rows)
        return
    # A forward of n rows leaves n - 1 rows more than the window, in order. Only the extra rows go.
    count = leaf.keys.shape[2]
    assert leaf._idx == count > rows, (leaf._idx, count, rows)
    leaf.keys, leaf.values = leaf.keys[..., : count - rows, :], leaf.values[..., : count - rows, :]
    leaf.offset -= rows
    leaf._idx -= rows
