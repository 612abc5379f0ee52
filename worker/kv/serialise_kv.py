"""Turns KV of several layers into the arrays of a disk record, and back.

Owner: the inference thread.

A record's arrays are named `<layer>.<part>`, or `<layer>.<part>.<format>` for packed rows. With the
format in the name, rows can be read whatever the settings are. `<bits>x<group>` is MLX's format,
`turboquant<bits>-<dtype>-<fingerprint>` is TurboQuant's. A part of a state that a layer has not
created yet is an empty array named `<layer>.<part>.none`.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from hearth.worker.disk.file_format import DTYPES, Array
from hearth.worker.kv.quantise_kv import (
    KVRows,
    LayerRows,
    LayerStates,
    MisfitRows,
    PackedFormat,
    QuantFormat,
    TurboFormat,
)

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
_NAME: Final = re.compile(r"([0-9]{1,4})\.([0-9]{1,3})(?:\.([a-z0-9.-]{1,60}))?")
_ABSENT: Final = "none"
_UNIFORM: Final = re.compile(r"([0-9]{1,2})x([0-9]{1,4})")
_TURBO: Final = re.compile(r"turboquant([0-9](?:\.5)?)-(float32|float16|bfloat16)-[0-9a-f]{8}")


class UnreadableRecord(Exception):
    """A record's arrays do not fit this model's layers."""


def arrays_of(kept: KVRows | LayerStates) -> tuple[Array, ...]:
    """Return rows or a snapshot as a record's arrays, which share the memory of `kept`."""
    found = []
    layers: Sequence[LayerRows | tuple[mx.array | None, ...]] = kept.layers
    for number, layer in enumerate(layers):
        form, arrays = "", layer if isinstance(layer, tuple) else layer.arrays
        if isinstance(layer, LayerRows) and layer.format is not None:
            form = f".{layer.format.label(layer.arrays)}"
        for part, array in enumerate(arrays):
            if array is None:
                found.append(Array(f"{number}.{part}.{_ABSENT}", "U8", _NOTHING))
            else:
                found.append(_array(f"{number}.{part}{form}", array))
    return tuple(found)


def rows_from(arrays: Iterable[Array]) -> KVRows:
    """Return the evaluated rows of a record.

    Raises:
        UnreadableRecord: the arrays are not rows, or not in the format that their names say.
    """
    kept = KVRows(tuple(_rows(parts) for parts in _layers(arrays)))
    mx.eval([array for rows in kept.layers for array in rows.arrays])
    return kept


def state_from(arrays: Iterable[Array]) -> LayerStates:
    """Return the evaluated snapshot of a record.

    Raises:
        UnreadableRecord: the arrays are not a snapshot.
    """
    layers = []
    for parts in _layers(arrays):
        if any(label not in ("", _ABSENT) for label, _ in parts):
            raise UnreadableRecord("a state is never packed")
        layers.append(tuple(array for _, array in parts))
    mx.eval([array for layer in layers for array in layer if array is not None])
    return LayerStates(tuple(layers))


def _array(name: str, array: mx.array) -> Array:
    kind = _KINDS.get(array.dtype)
    assert kind is not None, array.dtype
    if kind == "BF16":
        array = array.view(mx.uint16)
    buffer: Any = array  # MLX's arrays support the buffer protocol, but its stubs do not say so
    values: NDArray[Any] = np.asarray(memoryview(buffer))
    return Array(name, kind, values.view(DTYPES[kind]))


def _rows(parts: list[tuple[str, mx.array | None]]) -> LayerRows:
    """Return a layer's rows after checking the arrays against their labels."""
    labels = {label for label, _ in parts}
    arrays = tuple(array for _, array in parts if array is not None)
    if len(labels) != 1 or len(arrays) != len(parts):
        raise UnreadableRecord(f"a layer's arrays are of several formats: {sorted(labels)}")
    (label,) = labels
    form = _format(label) if label else None
    if form is not None and len(arrays) != form.array_count:
        raise UnreadableRecord(f"a layer has {len(arrays)} arrays")
    try:
        if isinstance(form, TurboFormat):
            form.check_label(label, arrays)
        elif form is not None:
            form.shapes(arrays)
    except MisfitRows as misfit:
        raise UnreadableRecord(f"a layer's arrays are no {label}: {misfit}") from misfit
    return LayerRows(arrays, form)


def _format(label: str) -> PackedFormat:
    if match := _UNIFORM.fullmatch(label):
        return QuantFormat(int(match[1]), int(match[2]))
    if match := _TURBO.fullmatch(label):
        return TurboFormat(float(match[1]), getattr(mx, match[2]))
    raise UnreadableRecord(f"an array's format is {label!r}")


def _layers(arrays: Iterable[Array]) -> list[list[tuple[str, mx.array | None]]]:
    """Return each layer's parts in order, as (format label, array)."""
    layers: list[list[tuple[str, mx.array | None]]] = []
    for array in arrays:
        match = _NAME.fullmatch(array.name)
        if match is None:
            raise UnreadableRecord(f"an array is named {array.name!r}")
        number, part = int(match[1]), int(match[2])
        if number == len(layers) and part == 0:
            layers.append([])
        if number != len(layers) - 1 or part != len(layers[-1]):
            raise UnreadableRecord(f"array {array.name!r} is out of order")
        label = match[3] or ""
        layers[-1].append((label, None if label == _ABSENT else _restored(array)))
    return layers


def _restored(array: Array) -> mx.array:
    """Return a copy of the array, which does not keep the record's whole buffer alive."""
    restored = mx.array(array.values)
    return restored.view(mx.bfloat16) if array.dtype == "BF16" else restored
