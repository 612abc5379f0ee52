"""Reads and writes the rows, windows and states of a model's caches, and takes forwards back.

What a layer's cache holds is declared by its kind (worker/kv/layer_kinds/), by the name of its
class. Owner: the inference thread.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import mlx.core as mx

from hearth.worker.cache.extent_store import Layout
from hearth.worker.disk.file_format import Record
from hearth.worker.kv.layer_kinds.kinds import kind_named, kind_of, leaves
from hearth.worker.kv.layer_kinds.layer_kind import LayerKind, StateArrays
from hearth.worker.kv.layer_kinds.row_kinds import UnfilledKind
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
PLAIN: Final = "KVCache"  # the class with rows that can be moved

ArrayForm = tuple[tuple[int, ...], mx.Dtype]


class LayerMap:
    """Reads and writes the caches of one model.

    `probe` is a cache that has seen some tokens, at least `layer_kinds.kinds.probe_tokens`.
    The map holds no cache. `has_room(nbytes)` says whether `nbytes` may be allocated: if not, a
    buffer that is too small grows only as much as needed. Owner: the inference thread.

    Raises:
        UnknownCache: no reuse is possible with this model.
    """

    def __init__(self, probe: list[Any]) -> None:
        self.has_room: Callable[[int], bool] = lambda _nbytes: True
        found = list(leaves(probe))
        self._kinds = [_probed_kind(leaf) for leaf in found]
        self.moved: Counter[tuple[str, str]] = Counter()  # by ("kept" or "restored", part)
        for leaf, kind in zip(found, self._kinds, strict=True):
            kind.check(leaf)
        pairs = list(zip(found, self._kinds, strict=True))
        # Of windows of several sizes, the widest are windows; the others are parts of the state.
        window = max((kind.window_size(leaf) for leaf, kind in pairs), default=0)
        self._has_window = [window > 0 and kind.window_size(leaf) == window for leaf, kind in pairs]
        groups = [rows for leaf, kind in pairs for rows in kind.rows(leaf)]
        rates = [rate for leaf, kind in pairs for rate in kind.rates(leaf)]
        self._present = [number for number, rows in enumerate(groups) if rows is not None]
        self._rates = [rates[number] for number in self._present]
        whole = [rows for rows in groups if rows is not None]
        self._shapes = [_forms(rows) for rows in whole]
        self._one_row = tuple(rows.part(0, 1) for rows in whole)
        self._no_row = [rows.part(0, 0) for rows in self._one_row]
        windows = [kind.window(leaf) for leaf, kind in self._windowed(probe)]
        self._window_shapes = [_forms(rows) for rows in windows]
        self._window_row_bytes = sum(
            array.nbytes // array.shape[2] for rows in windows for array in rows.arrays
        )
        states = tuple(parts for parts, _ in self._state_arrays(probe))
        self._states = [tuple(map(_form, parts)) for parts in states]
        self._is_ragged = [is_ragged for _, is_ragged in self._state_arrays(probe)]
        self._row_costs: dict[PackedFormat | None, tuple[int, int]] = {}
        self.row_bytes = self.row_cost(None)[0]
        self.window_buffers = sum(len(rows.arrays) for rows in windows)
        self.state_bytes = LayerStates(states).nbytes + sum(
            max(0, kind.window_size(leaf) - array.shape[2]) * (array.nbytes // array.shape[2])
            for (leaf, kind), has_window in zip(pairs, self._has_window, strict=True)
            if kind.window_size(leaf) and not has_window  # grows, up to the window's size
            for array in kind.window(leaf).arrays
        )
        self.state_buffers = sum(len(parts) for parts in states)
        self.layout = Layout(has_state=bool(states), window=window, has_rows=bool(whole))
        # The parts that caches of each class have; an eviction frees one part of all layers.
        self.parts: dict[str, set[str]] = {}
        for (leaf, kind), has_window in zip(pairs, self._has_window, strict=True):
            has = {
                "rows": any(rows is not None for rows in kind.rows(leaf)),
                "window": has_window,
                "state": bool(kind.state(leaf)) or (kind.window_size(leaf) > 0 and not has_window),
            }
            parts = self.parts.setdefault(type(leaf).__name__, set())
            parts.update(part for part, is_there in has.items() if is_there)

    def row_cost(self, form: PackedFormat | None) -> tuple[int, int]:
        """Return the bytes of one token's rows in `form`, rounded up, and their arrays' number."""
        if form not in self._row_costs:
            kept = KVRows(tuple(rows.converted(form) for rows in self._one_row))
            layers = zip(kept.layers, self._rates, strict=True)
            shares = (KVRows((rows,)).nbytes / rate for rows, rate in layers)
            self._row_costs[form] = math.ceil(sum(shares)), kept.buffers
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

    def are_rows(self, kept: KVRows, start: int, end: int) -> bool:
        """Return whether `kept` has this model's rows of the tokens [start, end), packed or not."""
        return _are_rows(kept, self.row_forms(start, end))

    def row_forms(self, start: int, end: int) -> list[list[ArrayForm]]:
        """Return the shapes and types of the rows of the tokens [start, end), by row group."""
        return [
            _with_rows(forms, end // rate - start // rate)
            for forms, rate in zip(self._shapes, self._rates, strict=True)
        ]

    def are_window_rows(self, kept: KVRows, tokens_max: int) -> bool:
        """Return whether `kept` has this model's window rows of at most `tokens_max` tokens."""
        if not kept.layers or kept.formats != {None}:
            return False
        keys = kept.layers[0].arrays[0]
        tokens = keys.shape[2] if keys.ndim == len("bhtd") else 0
        forms = [_with_rows(forms, tokens) for forms in self._window_shapes]
        return 0 < tokens <= tokens_max and _are_rows(kept, forms)

    def is_state(self, kept: LayerStates) -> bool:
        """Return whether `kept` is a snapshot of this model; parts not yet created may be None."""
        return len(kept.layers) == len(self._states) and all(
            _are_parts(parts, own, is_ragged)
            for parts, own, is_ragged in zip(
                kept.layers, self._states, self._is_ragged, strict=True
            )
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
        depths = (kind.depth(leaf) for leaf, kind in self._pairs(cache))
        return next((depth for depth in depths if depth is not None), None)

    def nbytes(self, cache: list[Any]) -> int:
        """Return the bytes of a live cache, spare rows included; 0 for one that is in a batch."""
        if not cache:
            return 0
        return sum(kind.nbytes(leaf) for leaf, kind in self._pairs(cache))

    # ------------------------------------------------------------ rows

    def rows(self, cache: list[Any], start: int, end: int) -> tuple[LayerRows, ...]:
        """Return views of the rows of the tokens [start, end).

        A view keeps the whole buffer alive. A row of several tokens is that of its last token.
        """
        groups = [rows for leaf, kind in self._pairs(cache) for rows in kind.rows(leaf)]
        found = zip(self._present, self._rates, self._no_row, strict=True)
        return tuple(
            (groups[number] or none).part(start // rate, end // rate)
            for number, rate, none in found
        )

    def kept_rows(
        self, kept: KVRows, start: int = 0, end: int | None = None
    ) -> tuple[LayerRows, ...]:
        """Return views of the kept rows of an extent from `start`, up to `end`; None = all rows."""
        if end is None:
            return kept.layers
        layers = zip(kept.layers, self._rates, strict=True)
        return tuple(rows.part(0, end // rate - start // rate) for rows, rate in layers)

    def copy_rows(
        self, cache: list[Any], start: int, end: int, form: PackedFormat | None
    ) -> KVRows:
        """Return copies of the rows of the tokens [start, end); raw rows are packed in `form`."""
        assert 0 <= start < end, (start, end)
        views = self.rows(cache, start, end)
        self.moved["kept", "rows"] += 1
        if form is not None:
            views = tuple(v.converted(form) if v.format is None else v for v in views)
        return _evaluated(views)

    def put_rows(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int, rows: int
    ) -> None:
        """Fill an empty cache with the rows of `position` tokens; leave room for `rows` in all."""
        self.moved["restored", "rows"] += 1
        for leaf, kind, numbers in self._grouped(cache):
            groups: list[LayerRows | None] = []
            for order, number in enumerate(numbers):
                if number is None:
                    groups.append(None)
                    continue
                form = _format(leaf) if order < kind.presized else None
                spare = max(rows, position) - position if order < kind.presized else 0
                layer, arrays = [run[number].converted(form) for run in row_runs], []
                for parts in zip(*(run.arrays for run in layer), strict=True):
                    count = sum(part.shape[2] for part in parts)
                    assert count == position // self._rates[number], (count, position)
                    arrays.append(_joined(parts, spare))
                groups.append(LayerRows(tuple(arrays), layer[0].format))
            kind.put_rows(leaf, groups, position)
            mx.eval([group.arrays for group in groups if group is not None])

    def reserve(self, cache: list[Any], rows: int) -> int:
        """Give every layer room for `rows` tokens; return the number of tokens that fit.

        Writes then stay in place. Layers whose class sizes its own buffers are left out.
        """
        room, wanted = UNBOUNDED, 0
        for leaf, kind, numbers in self._grouped(cache):
            if not kind.presized or numbers[0] is None:
                continue
            if leaf.keys is None:
                tokens = rounded(rows)
                empty = tuple(
                    mx.zeros(shape, dtype)
                    for shape, dtype in _with_rows(self._shapes[numbers[0]], tokens)
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
            if type(layer).__name__ == PLAIN:
                cache[index] = layer.to_quantized(group_size=form.group_size, bits=form.bits)
                if cache[index].keys is not None:
                    put_rows(cache[index], rows_of(cache[index]))
                    mx.eval(cache[index].keys, cache[index].values)

    def trim(self, cache: list[Any], position: int) -> None:
        """Forget the rows after `position`. The caller then puts windows and states back."""
        views = self.rows(cache, 0, position)
        for leaf, kind, numbers in self._grouped(cache):
            kind.trim(leaf, [None if n is None else views[n] for n in numbers], position)

    # ------------------------------------------------------------ windows

    def copy_window(self, cache: list[Any], tokens: int, behind: int = 0) -> KVRows:
        """Return the window layers' rows of the last `tokens` tokens, oldest first.

        The rows of the last `behind` tokens are left out.
        """
        assert 0 <= behind < tokens, (behind, tokens)
        self.moved["kept", "window"] += 1
        newest = []
        for leaf, kind in self._windowed(cache):
            rows = kind.window(leaf)
            count = rows.arrays[0].shape[2]
            assert count >= tokens, (count, tokens)
            newest.append(rows.part(count - tokens, count - behind))
        return _evaluated(newest)

    def window_held(self, cache: list[Any]) -> int:
        """Return for how many of the last tokens every window layer has rows."""
        return min(
            (
                min(kind.window_held(leaf), kind.window_size(leaf))
                for leaf, kind in self._windowed(cache)
            ),
            default=0,
        )

    def put_window(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int
    ) -> None:
        """Fill the window layers with the last rows of `row_runs`, which end at `position`."""
        self.moved["restored", "window"] += 1
        for number, (leaf, kind) in enumerate(self._windowed(cache)):
            wanted = min(position, kind.window_size(leaf))
            layer = [run[number].converted(None).arrays for run in row_runs]
            joined = [mx.concatenate(list(parts), axis=2) for parts in zip(*layer, strict=True)]
            count = joined[0].shape[2]
            assert count >= wanted, (count, wanted)
            arrays = [mx.contiguous(rows[..., count - wanted :, :]) for rows in joined]
            kind.put_window(leaf, arrays, position)
            mx.eval(arrays)

    # ------------------------------------------------------------ states

    def take_state(self, cache: list[Any]) -> LayerStates:
        """Return the current states, which no later forward changes."""
        self.moved["kept", "state"] += 1
        layers = tuple(
            tuple(None if array is None else mx.contiguous(array) for array in parts)
            for parts, _ in self._state_arrays(cache)
        )
        mx.eval(layers)
        return LayerStates(layers)

    def put_state(self, cache: list[Any], state: LayerStates, position: int) -> None:
        """Put the states at `position` back, after the rows and windows."""
        self.moved["restored", "state"] += 1
        layers = iter(state.layers)
        for (leaf, kind), has_window in zip(self._pairs(cache), self._has_window, strict=True):
            if kind.window_size(leaf) and not has_window:
                # Copied, because a window writes to its arrays in place.
                arrays = [mx.array(array) for array in next(layers) if array is not None]
                kind.put_window(leaf, arrays, position)
            elif kind.state(leaf):
                kind.put_state(leaf, next(layers), position)

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

    # ------------------------------------------------------------ layers by kind

    def _pairs(self, cache: list[Any]) -> Iterator[tuple[Any, LayerKind]]:
        return zip(leaves(cache), self._kinds, strict=True)

    def _windowed(self, cache: list[Any]) -> Iterator[tuple[Any, LayerKind]]:
        pairs = zip(self._pairs(cache), self._has_window, strict=True)
        return (pair for pair, has_window in pairs if has_window)

    def _grouped(self, cache: list[Any]) -> Iterator[tuple[Any, LayerKind, list[int | None]]]:
        """Yield each layer with its kind and the numbers of its row groups; None: without rows."""
        order, at = {number: index for index, number in enumerate(self._present)}, 0
        for leaf, kind in self._pairs(cache):
            count = len(kind.rows(leaf))
            yield leaf, kind, [order.get(at + index) for index in range(count)]
            at += count

    def _state_arrays(self, cache: list[Any]) -> list[tuple[StateArrays, bool]]:
        """Return (state without a copy, whether it is ragged) of the layers that have a state."""
        found: list[tuple[StateArrays, bool]] = []
        for (leaf, kind), has_window in zip(self._pairs(cache), self._has_window, strict=True):
            if (size := kind.window_size(leaf)) and not has_window:
                rows = kind.window(leaf)
                count = rows.arrays[0].shape[2]
                found.append((rows.part(max(0, count - size), count).arrays, True))
            elif parts := kind.state(leaf):
                found.append((parts, kind.ragged))
        return found


def raw_rows(leaf: Any) -> tuple[mx.array, mx.array] | None:
    """Return views of a layer's K and V rows of the last tokens, oldest first.

    None where the rows are packed. A view keeps the whole live buffer alive.
    """
    kind = kind_of(leaf)
    rows = kind.window(leaf) if kind.window_size(leaf) else rows_of(leaf).part(0, leaf.offset)
    return None if rows.format is not None else (rows.arrays[0], rows.arrays[1])


def _probed_kind(leaf: Any) -> LayerKind:
    kind = kind_of(leaf)
    is_unfilled = kind.presized and leaf.keys is None
    return UnfilledKind() if is_unfilled else kind


def _format(leaf: Any) -> QuantFormat | None:
    bits = getattr(leaf, "bits", None)
    return None if bits is None else QuantFormat(bits, leaf.group_size)


def _form(array: mx.array | None) -> ArrayForm | None:
    return None if array is None else (array.shape, array.dtype)


def _forms(rows: LayerRows) -> list[ArrayForm]:
    return [(array.shape, array.dtype) for array in rows.arrays]


def _with_rows(forms: Sequence[ArrayForm], rows: int) -> list[ArrayForm]:
    return [((*shape[:2], rows, shape[3]), dtype) for shape, dtype in forms]


def _are_rows(kept: KVRows, forms: Sequence[list[ArrayForm]]) -> bool:
    """Return whether the layers of `kept`, unpacked, have these shapes and types."""
    found = [list(zip(rows.shapes, rows.dtypes, strict=True)) for rows in kept.layers]
    return found == list(forms)


def _are_parts(parts: StateArrays, own: tuple[ArrayForm | None, ...], is_ragged: bool) -> bool:
    """Return whether a layer's state has the forms `own`; a part that is None fits any form."""

    def fixed(form: ArrayForm) -> tuple[tuple[int, ...], mx.Dtype]:
        shape, dtype = form
        return ((*shape[:-2], shape[-1]) if is_ragged else shape), dtype

    return len(parts) == len(own) and all(
        form is None or own_form is None or fixed(form) == fixed(own_form)
        for form, own_form in zip(map(_form, parts), own, strict=True)
    )


def rounded(rows: int) -> int:
    """Return the capacity in tokens of a new buffer for `rows`."""
    return -(-rows // STEP) * STEP


def _joined(parts: Sequence[mx.array], spare: int) -> mx.array:
    """Return the concatenated rows, with room for `spare` more. Lazy."""
    batch, heads, _, width = parts[0].shape
    return mx.concatenate([*parts, mx.zeros((batch, heads, spare, width), parts[0].dtype)], axis=2)


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
    kinds = [kind_named(type(leaf).__name__) for leaf in leaves(cache)]
    return all(kind is not None and kind.rewinds for kind in kinds)


class RewindPoint:
    """The state of a live cache before a forward of several rows, to take the forward back.

    A point is valid until the next forward; until then `cut` and `back` may both be called, in any
    order. Layers with rows of every token lose their last rows. Window layers do too: the forward
    of several rows made a longer array. Other layers get the arrays back that their kind has saved.
    Only the rows of a branch are copied, to their new positions. A forward of one row overwrites a
    window in place, so that at most one forward can be taken back.
    """

    def __init__(self, cache: Sequence[Any]) -> None:
        self._layers = [(leaf, kind_of(leaf)) for leaf in leaves(cache)]
        self._saved: list[Any] = []
        if not self.keeps_rows:
            self._saved = [kind.checkpoint(leaf) for leaf, kind in self._layers]

    @property
    def keeps_rows(self) -> bool:
        """Whether any number of the forward's rows can be cut: no layer keeps a state."""
        return all(kind.cuts for _, kind in self._layers)

    def cut(self, rows: int) -> None:
        """Remove the last `rows` of the forward, which had more rows than that."""
        assert self.keeps_rows, "a state can't be taken back by some rows"
        for leaf, kind in self._layers:
            kind.cut(leaf, rows)

    def pick(self, rows: int, path: Sequence[int]) -> None:
        """Of the forward's last `rows`, keep only those in `path`, which ascends.

        `path` is not empty. Unless `path` is the beginning of the rows, every layer is PLAIN.
        """
        assert list(path) == sorted(set(path)), path
        if list(path) != list(range(len(path))):
            _move([leaf for leaf, _ in self._layers], rows, path)
        self.cut(rows - len(path))

    def back(self, rows: int) -> None:
        """Take back the whole forward, which had `rows` rows."""
        assert not self.keeps_rows, "no layer keeps a state: call cut"
        for (leaf, kind), saved in zip(self._layers, self._saved, strict=True):
            kind.back(leaf, saved, rows)


def _move(layers: Sequence[Any], rows: int, path: Sequence[int]) -> None:
    """Move the rows in `path` to the beginning of the last `rows`, in order."""
    assert all(type(leaf).__name__ == PLAIN for leaf in layers), "a branch is of plain rows"
    layers = [leaf for leaf in layers if leaf.keys is not None]  # others have no attention
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
