"""Packs rows of KV into fewer bits and unpacks them, by MLX's affine packing or by TurboQuant.

Owner: the inference thread.
"""

import hashlib
import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Final

import mlx.core as mx
import numpy as np

from hearth.shared.machine import VISION_REMEDY, has_vision

RowShapes = tuple[tuple[int, ...], ...]  # of each array, as of K and V: (batch, heads, rows, width)

KEYS_AND_VALUES: Final = 2  # arrays of a row group that can be packed
WORD_BITS: Final = 32  # bits of the words that hold packed numbers
AFFINE_BITS: Final = (2, 3, 4, 5, 6, 8)  # bits that `mx.quantize` supports
AFFINE_GROUP_SIZES: Final = (32, 64, 128)
WIDTH_STEP: Final = 32  # numbers per row come in whole words: the packed width gives the row width
WIDTH_MAX: Final = 1024  # most numbers per row: a thread group of mlx-vlm's Metal kernels
BITS_MIN: Final = 2
BITS_MAX: Final = 8


class MisfitRows(Exception):
    """Arrays do not have the shapes or types that their format requires."""


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """The bits and the group size in which MLX packs rows: six arrays per layer.

    `scheme` is the name of the format in KV_QUANT_SCHEME. `array_count` is the number of arrays per
    layer; the first half belongs to the keys.
    """

    bits: int  # bits per number, 4 or 8, without the scales and biases
    group_size: int  # numbers of a row that share a scale and a bias
    scheme: ClassVar[str] = "uniform"
    array_count: ClassVar[int] = 6

    def fits(self, arrays: tuple[mx.array, ...]) -> bool:
        """Whether rows with the widths of `arrays` can be packed in this format."""
        widths = [array.shape[-1] for array in arrays]
        return len(widths) == KEYS_AND_VALUES and all(
            n > 0 and n % self.group_size == 0 for n in widths
        )

    def pack(self, arrays: tuple[mx.array, ...]) -> tuple[mx.array, ...] | None:
        """Return words, scales and biases of the keys, then those of the values. Lazy."""
        size, bits = self.group_size, self.bits
        packed = [mx.quantize(array, group_size=size, bits=bits) for array in arrays]
        return tuple(part for parts in packed for part in parts)

    def unpack(self, arrays: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        """Return keys and values, in the precision that packing left."""
        size, bits = self.group_size, self.bits
        return tuple(
            mx.dequantize(words, scales, biases, group_size=size, bits=bits)
            for words, scales, biases in (arrays[:3], arrays[3:])
        )

    def label(self, arrays: tuple[mx.array, ...]) -> str:
        """Return the name of this format in files."""
        return f"{self.bits}x{self.group_size}"

    def shapes(self, arrays: tuple[mx.array, ...]) -> RowShapes:
        """Return the shapes of the unpacked keys and values. Computes nothing.

        Raises:
            MisfitRows: the arrays are not in this format.
        """
        if self.bits not in AFFINE_BITS or self.group_size not in AFFINE_GROUP_SIZES:
            raise MisfitRows(f"{self.bits} bits in groups of {self.group_size} are not known")
        keys, values = (self._shape(*half) for half in (arrays[:3], arrays[3:]))
        return keys, values

    def dtypes(self, arrays: tuple[mx.array, ...]) -> tuple[mx.Dtype, mx.Dtype]:
        """Return the types of the unpacked keys and values."""
        return arrays[1].dtype, arrays[4].dtype  # types of the scales

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
class TurboFormat:
    """The bits in which mlx-vlm's TurboQuant packs rows: rotated, and rounded to a codebook.

    A layer has four arrays: lengths (batch, heads, tokens, 1) and codes of the keys, then those of
    the values. Keys are packed in `bits` rounded down, values in `bits` rounded up.

    Only this module uses mlx-vlm's TurboQuant, and only public names of it. mlx-vlm does not store
    the rotation and the codebook, which follow from the bits, the widths, a fixed seed and the
    versions of mlx-vlm and numpy. Written rows therefore carry a fingerprint of rotation and
    codebook, and rows with another fingerprint are not read.
    """

    bits: float  # a multiple of 0.5
    dtype: mx.Dtype  # type of the unpacked rows
    scheme: ClassVar[str] = "turboquant"
    array_count: ClassVar[int] = 4

    def fits(self, arrays: tuple[mx.array, ...]) -> bool:
        return len(arrays) == KEYS_AND_VALUES and all(
            _is_width(array.shape[-1]) and array.dtype == self.dtype for array in arrays
        )

    def pack(self, arrays: tuple[mx.array, ...]) -> tuple[mx.array, ...] | None:
        """Return the evaluated packed rows; None where a length does not fit into a float16."""
        packer = _turbo_cache(self.bits)
        packer.update_and_fetch(*arrays)
        keys, values = packer.state
        is_whole = mx.all(mx.isfinite(keys.norms)) & mx.all(mx.isfinite(values.norms))
        if not is_whole.item():
            return None
        return keys.norms[..., None], keys.indices, values.norms[..., None], values.indices

    def unpack(self, arrays: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        widths = tuple(shape[-1] for shape in self.shapes(arrays))
        return tuple(rows.astype(self.dtype) for rows in _unpacked(self.bits, widths, arrays))

    def label(self, arrays: tuple[mx.array, ...]) -> str:
        widths, dtype = tuple(shape[-1] for shape in self.shapes(arrays)), _dtype_name(self.dtype)
        sample = _sample(self.bits, widths) + dtype.encode()
        fingerprint = hashlib.blake2b(sample, digest_size=4).hexdigest()
        return f"turboquant{self.bits:g}-{dtype}-{fingerprint}"

    def shapes(self, arrays: tuple[mx.array, ...]) -> RowShapes:
        if not BITS_MIN <= self.bits <= BITS_MAX or not float(2 * self.bits).is_integer():
            raise MisfitRows(f"{self.bits:g} bits are not known")
        keys_bits, values_bits = _split(self.bits)
        return _turbo_shape(keys_bits, *arrays[:2]), _turbo_shape(values_bits, *arrays[2:])

    def dtypes(self, arrays: tuple[mx.array, ...]) -> tuple[mx.Dtype, mx.Dtype]:
        return self.dtype, self.dtype

    def check_label(self, label: str, arrays: tuple[mx.array, ...]) -> None:
        """Raise MisfitRows if another version of the code packed the arrays."""
        if not has_vision():
            raise MisfitRows(f"mlx-vlm is not installed; {VISION_REMEDY}")
        own = self.label(arrays)
        if label != own:
            raise MisfitRows(f"packed as {label}, and here that would be {own}")


PackedFormat = QuantFormat | TurboFormat


@dataclass(frozen=True, slots=True)
class LayerRows:
    """A row group of one layer, with the rows on axis 2 of each array.

    The arrays are (keys, values), the packed arrays of `format`, or whatever else the layer's kind
    keeps of each token or of several tokens (worker/kv/layer_kinds/).
    """

    arrays: tuple[mx.array, ...]
    format: PackedFormat | None = None

    def __post_init__(self) -> None:
        is_whole = self.format is None or len(self.arrays) == self.format.array_count
        assert self.arrays and is_whole, (len(self.arrays), self.format)

    @property
    def shapes(self) -> RowShapes:
        """The shapes of the arrays, unpacked.

        Raises:
            MisfitRows: the arrays are not in their format.
        """
        if self.format is not None:
            return self.format.shapes(self.arrays)
        return tuple(array.shape for array in self.arrays)

    @property
    def dtypes(self) -> tuple[mx.Dtype, ...]:
        """The types of the arrays, unpacked."""
        if self.format is not None:
            return self.format.dtypes(self.arrays)
        return tuple(array.dtype for array in self.arrays)

    def part(self, start: int, end: int) -> "LayerRows":
        """Return the rows [start, end) as views."""
        return LayerRows(tuple(a[..., start:end, :] for a in self.arrays), self.format)

    def converted(self, wanted: PackedFormat | None) -> "LayerRows":
        """Return the rows in the wanted format, or raw rows where that format does not fit them."""
        if wanted == self.format:
            return self
        raw = self if self.format is None else LayerRows(self.format.unpack(self.arrays))
        if wanted is None or not wanted.fits(raw.arrays):
            return raw
        packed = wanted.pack(raw.arrays)
        return raw if packed is None else LayerRows(packed, wanted)


@dataclass(frozen=True, slots=True)
class KVRows:
    """The evaluated K and V rows of an extent in all layers of one kind.

    The arrays are never views of a live buffer. Rows that fill a whole buffer share its memory
    until MLX writes to the buffer.
    """

    layers: tuple[LayerRows, ...]
    nbytes: int = field(init=False)  # computed once, because reports add up thousands every second

    def __post_init__(self) -> None:
        nbytes = sum(array.nbytes for rows in self.layers for array in rows.arrays)
        object.__setattr__(self, "nbytes", nbytes)

    @property
    def buffers(self) -> int:
        return sum(len(rows.arrays) for rows in self.layers)

    @property
    def formats(self) -> set[PackedFormat | None]:
        """The formats of the layers; a layer that does not fit the packed format is raw (None)."""
        return {rows.format for rows in self.layers}


def as_rows(part: object) -> KVRows:
    """Return a part of the extent store, typed as the K and V rows that the part is."""
    assert isinstance(part, KVRows)
    return part


@dataclass(frozen=True, slots=True)
class LayerStates:
    """A snapshot: the states of all state layers. Layers replace state arrays, never write them."""

    layers: tuple[tuple[mx.array | None, ...], ...]
    nbytes: int = field(init=False)  # computed once

    def __post_init__(self) -> None:
        nbytes = sum(a.nbytes for layer in self.layers for a in layer if a is not None)
        object.__setattr__(self, "nbytes", nbytes)

    @property
    def buffers(self) -> int:
        return sum(a is not None for layer in self.layers for a in layer)


def rows_of(layer: Any) -> LayerRows:
    """Return all rows of a KVCache or QuantizedKVCache as they are, spare capacity included."""
    if isinstance(layer.keys, tuple | list):
        form = QuantFormat(layer.bits, layer.group_size)
        return LayerRows((*layer.keys, *layer.values), form)
    return LayerRows((layer.keys, layer.values))


def put_rows(layer: Any, rows: LayerRows) -> None:
    """Make `rows` the buffers of a layer. The layer's class must fit the format of `rows`."""
    if rows.format is None:
        layer.keys, layer.values = rows.arrays
    else:
        # Lists, because QuantizedKVCache replaces single arrays.
        layer.keys, layer.values = list(rows.arrays[:3]), list(rows.arrays[3:])


# ---------------------------------------------------------------- TurboQuant


def _is_width(width: int) -> bool:
    return 0 < width <= WIDTH_MAX and width % WIDTH_STEP == 0


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _turbo_shape(bits: int, lengths: mx.array, codes: mx.array) -> tuple[int, ...]:
    """Return the shape of the rows that these lengths and codes pack."""
    width, rest = divmod(codes.shape[-1] * WORD_BITS, bits)
    if rest or not _is_width(width) or codes.ndim != 4 or codes.dtype != mx.uint32:
        raise MisfitRows(f"codes of {codes.shape} for elements of {bits} bits")
    if lengths.shape != (*codes.shape[:-1], 1) or lengths.dtype != mx.float16:
        raise MisfitRows(f"lengths of {lengths.shape} for codes of {codes.shape}")
    return (*codes.shape[:-1], width)


def _turboquant() -> Any:
    from mlx_vlm import turboquant

    return turboquant


def _split(bits: float) -> tuple[int, int]:
    """Return the bits of the keys and of the values."""
    return math.floor(bits), math.ceil(bits)


def _turbo_cache(bits: float) -> Any:
    keys_bits, values_bits = _split(bits)
    return _turboquant().TurboQuantKVCache(bits, key_bits=keys_bits, value_bits=values_bits)


# Kept for everybody: TurboQuant's tables
@cache
def _unpacker(bits: float, widths: tuple[int, ...]) -> Any:
    """Return an mlx-vlm cache that has packed rows of these widths, as unpacking requires."""
    unpacker = _turbo_cache(bits)
    unpacker.update_and_fetch(*(mx.zeros((1, 1, 2, width)) for width in widths))
    return unpacker


def _unpacked(
    bits: float, widths: tuple[int, ...], arrays: tuple[mx.array, ...]
) -> tuple[mx.array, ...]:
    """Return keys and values as float32. Lazy."""
    state = _turboquant().TurboQuantMSEState
    keys, values = (state(arrays[index][..., 0], arrays[index + 1]) for index in (0, 2))
    unpacked: tuple[mx.array, ...] = _unpacker(bits, widths).dequantize(keys, values)
    return unpacked


# Kept for everybody: TurboQuant's tables
@cache
def _sample(bits: float, widths: tuple[int, ...]) -> bytes:
    """Return the unpacked values of fixed codes, rounded so that every call gives the same."""
    arrays = []
    for width, element_bits in zip(widths, _split(bits), strict=True):
        count = width * element_bits // WORD_BITS
        codes = (np.arange(4 * count, dtype=np.uint64) * 2_654_435_761 + 97).astype(np.uint32)
        arrays += [mx.ones((1, 1, 4, 1), mx.float16), mx.array(codes).reshape(1, 1, 4, count)]
    unpacked = [np.array(rows) for rows in _unpacked(bits, widths, tuple(arrays))]
    return b"".join(np.rint(rows * 64).astype(np.int16).tobytes() for rows in unpacked)
