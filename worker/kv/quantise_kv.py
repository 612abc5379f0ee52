"""Packs rows of KV in fewer bits and unpacks them, by MLX's own affine quantisation."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """The bits and the group size in which rows are packed."""

    bits: int  # 4 or 8
    group_size: int  # elements of a row that share scale and bias

    def fits(self, arrays: tuple[mx.array, ...]) -> bool:
        """Whether rows of these widths can be packed so."""
        return all(a.shape[-1] > 0 and a.shape[-1] % self.group_size == 0 for a in arrays)


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of one layer, token axis 2: (keys, values), or six arrays where `format` is set."""

    arrays: tuple[mx.array, ...]
    format: QuantFormat | None = None

    def __post_init__(self) -> None:
        count = 2 if self.format is None else 6
        assert len(self.arrays) == count, (len(self.arrays), self.format)

    def part(self, start: int, end: int) -> "LayerRows":
        """Return the rows [start, end) as views."""
        return LayerRows(tuple(a[..., start:end, :] for a in self.arrays), self.format)

    def converted(self, wanted: QuantFormat | None) -> "LayerRows":
        """Return the rows in another format. Lazy."""
        if wanted == self.format:
            return self
        raw = self._raw()
        if wanted is None or not wanted.fits(raw.arrays):
            return raw
        packed = [
            part
            for array in raw.arrays
            for part in mx.quantize(array, group_size=wanted.group_size, bits=wanted.bits)
        ]
        return LayerRows(tuple(packed), wanted)

    def _raw(self) -> "LayerRows":
        if self.format is None:
            return self
        group_size, bits = self.format.group_size, self.format.bits
        halves = (self.arrays[:3], self.arrays[3:])
        raw = [
            mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits)
            for packed, scales, biases in halves
        ]
        return LayerRows(tuple(raw))


def rows_of(layer: Any) -> LayerRows:
    """Return all rows of a KVCache or QuantizedKVCache, spare capacity included, as they are."""
    if isinstance(layer.keys, tuple | list):
        form = QuantFormat(layer.bits, layer.group_size)
        return LayerRows((*layer.keys, *layer.values), form)
    return LayerRows((layer.keys, layer.values))


def put_rows(layer: Any, rows: LayerRows) -> None:
    """Make `rows` the buffers of a layer whose class fits their format."""
    if rows.format is None:
        layer.keys, layer.values = rows.arrays
    else:
        # Lists, as QuantizedKVCache assigns to their elements.
        layer.keys, layer.values = list(rows.arrays[:3]), list(rows.arrays[3:])
