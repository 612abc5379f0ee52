"""Packs rows of KV in fewer bits and unpacks them: what a packing is, and MLX's own affine one."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol

import mlx.core as mx

RowShapes = tuple[tuple[int, ...], tuple[int, ...]]  # of keys and values, (batch, heads, tokens, n)

WORD_BITS: Final = 32  # packed elements lie in words of so many
AFFINE_BITS: Final = (2, 3, 4, 5, 6, 8)  # what `mx.quantize` packs
AFFINE_GROUP_SIZES: Final = (32, 64, 128)


class MisfitRows(Exception):
    """Arrays are not what their format says."""


class PackedFormat(Protocol):
    """How the rows of a layer are packed. Equal formats read each other's arrays."""

    @property
    def bits(self) -> float:
        """Bits of an element, without what a group or a row of them shares."""

    @property
    def scheme(self) -> str:
        """The word for it in KV_QUANT_SCHEME."""

    @property
    def array_count(self) -> int:
        """How many arrays a layer has, half of them of the keys."""

    def fits(self, arrays: tuple[mx.array, ...]) -> bool:
        """Whether rows of these widths can be packed so."""

    def pack(self, arrays: tuple[mx.array, ...]) -> tuple[mx.array, ...] | None:
        """Return keys and values packed; None where their values do not allow it."""

    def unpack(self, arrays: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        """Return keys and values as they were, but for what packing lost."""

    def label(self, arrays: tuple[mx.array, ...]) -> str:
        """Return what a file calls this format."""

    def shapes(self, arrays: tuple[mx.array, ...]) -> RowShapes:
        """Return the shapes of keys and values once they are unpacked; nothing is computed.

        Raises:
            MisfitRows: the arrays are not in this format.
        """

    def dtypes(self, arrays: tuple[mx.array, ...]) -> tuple[mx.Dtype, mx.Dtype]:
        """Return the types of keys and values once they are unpacked."""


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """The bits and the group size in which MLX packs rows: six arrays a layer."""

    bits: int  # 4 or 8
    group_size: int  # elements of a row that share scale and bias
    scheme: ClassVar[str] = "uniform"
    array_count: ClassVar[int] = 6

    def fits(self, arrays: tuple[mx.array, ...]) -> bool:
        return all(a.shape[-1] > 0 and a.shape[-1] % self.group_size == 0 for a in arrays)

    def pack(self, arrays: tuple[mx.array, ...]) -> tuple[mx.array, ...] | None:
        """Return words, scales and biases of the keys, then of the values. Lazy."""
        size, bits = self.group_size, self.bits
        packed = [mx.quantize(array, group_size=size, bits=bits) for array in arrays]
        return tuple(part for parts in packed for part in parts)

    def unpack(self, arrays: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        size, bits = self.group_size, self.bits
        return tuple(
            mx.dequantize(words, scales, biases, group_size=size, bits=bits)
            for words, scales, biases in (arrays[:3], arrays[3:])
        )

    def label(self, arrays: tuple[mx.array, ...]) -> str:
        return f"{self.bits}x{self.group_size}"

    def shapes(self, arrays: tuple[mx.array, ...]) -> RowShapes:
        if self.bits not in AFFINE_BITS or self.group_size not in AFFINE_GROUP_SIZES:
            raise MisfitRows(f"{self.bits} bits in groups of {self.group_size} are not known")
        keys, values = (self._shape(*half) for half in (arrays[:3], arrays[3:]))
        return keys, values

    def dtypes(self, arrays: tuple[mx.array, ...]) -> tuple[mx.Dtype, mx.Dtype]:
        return arrays[1].dtype, arrays[4].dtype  # of the scales

    def _shape(self, words: mx.array, scales: mx.array, biases: mx.array) -> tuple[int, ...]:
        if len({words.shape[:-1], scales.shape[:-1], biases.shape[:-1]}) != 1 or words.ndim != 4:
            raise MisfitRows(f"arrays of {words.shape}, {scales.shape} and {biases.shape}")
        width = scales.shape[-1] * self.group_size
        if words.dtype != mx.uint32 or words.shape[-1] * WORD_BITS != width * self.bits:
            raise MisfitRows(f"{words.shape[-1]} words for {width} elements of {self.bits} bits")
        if scales.shape != biases.shape or scales.dtype != biases.dtype:
            raise MisfitRows(f"scales of {scales.shape} and biases of {biases.shape}")
        return (*words.shape[:-1], width)


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of one layer, token axis 2: (keys, values), or the arrays of `format`, if it is set."""

    arrays: tuple[mx.array, ...]
    format: PackedFormat | None = None

    def __post_init__(self) -> None:
        count = 2 if self.format is None else self.format.array_count
        assert len(self.arrays) == count, (len(self.arrays), self.format)

    @property
    def shapes(self) -> RowShapes:
        """The shapes of keys and values, unpacked.

        Raises:
            MisfitRows: the arrays are not in their format.
        """
        if self.format is not None:
            return self.format.shapes(self.arrays)
        keys, values = self.arrays
        return keys.shape, values.shape

    @property
    def dtypes(self) -> tuple[mx.Dtype, mx.Dtype]:
        """The types of keys and values, unpacked."""
        if self.format is not None:
            return self.format.dtypes(self.arrays)
        keys, values = self.arrays
        return keys.dtype, values.dtype

    def part(self, start: int, end: int) -> "LayerRows":
        """Return the rows [start, end) as views."""
        return LayerRows(tuple(a[..., start:end, :] for a in self.arrays), self.format)

    def converted(self, wanted: PackedFormat | None) -> "LayerRows":
        """Return the rows in another format, raw where they do not fit into it."""
        if wanted == self.format:
            return self
        raw = self if self.format is None else LayerRows(self.format.unpack(self.arrays))
        if wanted is None or not wanted.fits(raw.arrays):
            return raw
        packed = wanted.pack(raw.arrays)
        return raw if packed is None else LayerRows(packed, wanted)


@dataclass(frozen=True, slots=True)
class KVRows:
    """K and V rows of several layers: what an extent keeps of some tokens. Evaluated.

    Never a view of a live buffer, but for a run that is all of one, which MLX shares until it is
    written.
    """

    layers: tuple[LayerRows, ...]
    nbytes: int = field(init=False)  # counted once: reports sum thousands, every second

    def __post_init__(self) -> None:
        nbytes = sum(array.nbytes for rows in self.layers for array in rows.arrays)
        object.__setattr__(self, "nbytes", nbytes)

    @property
    def buffers(self) -> int:
        return sum(len(rows.arrays) for rows in self.layers)

    @property
    def formats(self) -> set[PackedFormat | None]:
        """How its layers are packed; a layer that does not fit into a format is raw beside it."""
        return {rows.format for rows in self.layers}


def as_rows(part: object) -> KVRows:
    """Return what the extent store keeps as it is, K and V rows."""
    assert isinstance(part, KVRows)
    return part


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of all state layers: a snapshot. Layers rebind their arrays, never write them."""

    layers: tuple[tuple[mx.array | None, ...], ...]
    nbytes: int = field(init=False)  # counted once, too

    def __post_init__(self) -> None:
        nbytes = sum(a.nbytes for layer in self.layers for a in layer if a is not None)
        object.__setattr__(self, "nbytes", nbytes)

    @property
    def buffers(self) -> int:
        return sum(a is not None for layer in self.layers for a in layer)


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
