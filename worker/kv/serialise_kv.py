"""Turns KV of several layers into the arrays of a disk record, and back.

Owner: the inference thread.

A record's arrays are named `<layer>.<part>`, those of packed rows `<layer>.<part>.<bits>x<group>`;
a state's entry that a layer has not made yet is `<layer>.<part>.none`, an array of nothing.
"""

import re
from collections.abc import Iterable
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from hearth.worker.disk.file_format import DTYPES, Array
from hearth.worker.kv.layer_adapters import KVRows, LayerStates
from hearth.worker.kv.quantise_kv import LayerRows, QuantFormat

_KINDS: Final[dict[mx.Dtype, str]] = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.bfloat16: "BF16",
    mx.float16: "F16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
}
_NOTHING: Final = np.zeros(0, np.uint8)
_NAME: Final = re.compile(r"(\d{1,4})\.(\d{1,3})(?:\.(none|(\d{1,2})x(\d{1,4})))?")


class UnreadableRecord(Exception):
    """A record's arrays are not those of this model's layers."""


def arrays_of_rows(layers: Iterable[LayerRows]) -> tuple[Array, ...]:
    """Return rows as a record's arrays; they share the memory of the evaluated MLX arrays."""
    found = []
    for number, rows in enumerate(layers):
        form = f".{rows.format.bits}x{rows.format.group_size}" if rows.format is not None else ""
        for part, array in enumerate(rows.arrays):
            found.append(_array(f"{number}.{part}{form}", array))
    return tuple(found)


def arrays_of_state(state: LayerStates) -> tuple[Array, ...]:
    """Return a snapshot as a record's arrays, likewise."""
    return tuple(
        Array(f"{number}.{part}.none", "U8", _NOTHING)
        if array is None
        else _array(f"{number}.{part}", array)
        for number, layer in enumerate(state.layers)
        for part, array in enumerate(layer)
    )


def rows_from(arrays: Iterable[Array]) -> KVRows:
    """Return the rows of a record, evaluated.

    Raises:
        UnreadableRecord: they are not rows, two arrays a layer or six where they are packed.
    """
    layers = []
    for parts in _layers(arrays):
        forms = {form for form, _ in parts}
        whole = tuple(array for _, array in parts if array is not None)
        if len(forms) != 1 or len(whole) != len(parts):
            raise UnreadableRecord(
                f"a layer's arrays are of several forms: {sorted(map(str, forms))}"
            )
        (form,) = forms
        if len(whole) != (2 if form is None else 6):
            raise UnreadableRecord(f"a layer has {len(whole)} arrays")
        layers.append(LayerRows(whole, form))
    kept = KVRows(tuple(layers))
    mx.eval([array for rows in kept.layers for array in rows.arrays])
    return kept


def state_from(arrays: Iterable[Array]) -> LayerStates:
    """Return the snapshot of a record, evaluated.

    Raises:
        UnreadableRecord: the arrays are no snapshot's.
    """
    layers = []
    for parts in _layers(arrays):
        if any(form is not None for form, _ in parts):
            raise UnreadableRecord("a state is never packed")
        layers.append(tuple(array for _, array in parts))
    mx.eval([array for layer in layers for array in layer if array is not None])
    return LayerStates(tuple(layers))


def _array(name: str, array: mx.array) -> Array:
    kind = _KINDS.get(array.dtype)
    assert kind is not None, array.dtype
    if kind == "BF16":
        array = array.view(mx.uint16)
    buffer: Any = array  # MLX's arrays are buffers, which its stubs do not say
    values: NDArray[Any] = np.asarray(memoryview(buffer))
    return Array(name, kind, values.view(DTYPES[kind]))


def _layers(arrays: Iterable[Array]) -> list[list[tuple[QuantFormat | None, mx.array | None]]]:
    """Return each layer's parts in order, with the format that its name tells."""
    layers: list[list[tuple[QuantFormat | None, mx.array | None]]] = []
    for array in arrays:
        match = _NAME.fullmatch(array.name)
        if match is None:
            raise UnreadableRecord(f"an array is named {array.name!r}")
        number, part = int(match[1]), int(match[2])
        if number == len(layers) and part == 0:
            layers.append([])
        if number != len(layers) - 1 or part != len(layers[-1]):
            raise UnreadableRecord(f"array {array.name!r} is out of order")
        form = QuantFormat(int(match[4]), int(match[5])) if match[4] else None
        layers[-1].append((form, None if match[3] == "none" else _restored(array)))
    return layers


def _restored(array: Array) -> mx.array:
    """Return an array of its own: the record's buffer is not pinned by it."""
    restored = mx.array(array.values)
    return restored.view(mx.bfloat16) if array.dtype == "BF16" else restored
