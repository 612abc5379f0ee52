"""Packs rows of KV by mlx-vlm's TurboQuant.

Each row is rotated, its elements are rounded to a codebook, and its length is kept. This module
alone uses mlx-vlm's code for it, and its public names only. That code keeps no record of how it
rotates and rounds: both follow from the bits, the widths, a fixed seed and the versions of mlx-vlm
and numpy. What is written therefore carries a fingerprint of them, and rows of another are not
read.
Owner: the inference thread.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final

import mlx.core as mx
import numpy as np

from hearth.shared.optional_packages import VISION_REMEDY, has_vision
from hearth.worker.kv.quantise_kv import WORD_BITS, MisfitRows, RowShapes

WIDTH_STEP: Final = 32  # elements: whole words, so that an array's width tells a row's
WIDTH_MAX: Final = 1024  # elements: a row is one thread group of mlx-vlm's Metal kernels
BITS_MIN: Final = 2
BITS_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class TurboFormat:
    """The bits, by which the keys' are rounded down and the values' up, and the type of raw rows.

    Four arrays a layer: lengths (batch, heads, tokens, 1) and codes of the keys, then of the
    values.
    """

    bits: float  # whole or a half
    dtype: mx.Dtype
    scheme: ClassVar[str] = "turboquant"
    array_count: ClassVar[int] = 4

    def fits(self, arrays: tuple[mx.array, ...]) -> bool:
        return all(_is_width(a.shape[-1]) and a.dtype == self.dtype for a in arrays)

    def pack(self, arrays: tuple[mx.array, ...]) -> tuple[mx.array, ...] | None:
        """Return rows packed, evaluated; None where one is longer than a float16 can tell."""
        packer = _cache(self.bits)
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
        told = _sample(self.bits, widths) + dtype.encode()
        fingerprint = hashlib.blake2b(told, digest_size=4).hexdigest()
        return f"turboquant{self.bits:g}-{dtype}-{fingerprint}"

    def shapes(self, arrays: tuple[mx.array, ...]) -> RowShapes:
        if not is_supported(self.bits):
            raise MisfitRows(f"{self.bits:g} bits are not known")
        keys_bits, values_bits = _split(self.bits)
        return _shape(keys_bits, *arrays[:2]), _shape(values_bits, *arrays[2:])

    def dtypes(self, arrays: tuple[mx.array, ...]) -> tuple[mx.Dtype, mx.Dtype]:
        return self.dtype, self.dtype

    def check_label(self, label: str, arrays: tuple[mx.array, ...]) -> None:
        """Raise MisfitRows where the arrays were packed by other code than is installed here."""
        if not has_vision():
            raise MisfitRows(f"mlx-vlm is not installed; {VISION_REMEDY}")
        own = self.label(arrays)
        if label != own:
            raise MisfitRows(f"packed as {label}, and here that would be {own}")


def is_supported(bits: float) -> bool:
    """Return whether rows can be packed in so many bits."""
    return BITS_MIN <= bits <= BITS_MAX and float(2 * bits).is_integer()


def _is_width(width: int) -> bool:
    return 0 < width <= WIDTH_MAX and width % WIDTH_STEP == 0


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _shape(bits: int, lengths: mx.array, codes: mx.array) -> tuple[int, ...]:
    """Return the shape of the rows whose lengths and codes these are."""
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


def _cache(bits: float) -> Any:
    keys_bits, values_bits = _split(bits)
    return _turboquant().TurboQuantKVCache(bits, key_bits=keys_bits, value_bits=values_bits)


# Kept for everybody: TurboQuant's tables
@cache
def _unpacker(bits: float, widths: tuple[int, ...]) -> Any:
    """Return a cache of mlx-vlm's that has seen rows of these widths, and so can unpack such."""
    unpacker = _cache(bits)
    unpacker.update_and_fetch(*(mx.zeros((1, 1, 2, width)) for width in widths))
    return unpacker


def _unpacked(
    bits: float, widths: tuple[int, ...], arrays: tuple[mx.array, ...]
) -> tuple[mx.array, ...]:
    """Return keys and values as float32. Lazy."""
    state = _turboquant().TurboQuantMSEState
    keys, values = (state(arrays[at][..., 0], arrays[at + 1]) for at in (0, 2))
    unpacked: tuple[mx.array, ...] = _unpacker(bits, widths).dequantize(keys, values)
    return unpacked


# Kept for everybody: TurboQuant's tables
@cache
def _sample(bits: float, widths: tuple[int, ...]) -> bytes:
    """Return what fixed codes unpack to, in steps coarse enough to be the same each time."""
    arrays = []
    for width, each in zip(widths, _split(bits), strict=True):
        count = width * each // WORD_BITS
        codes = (np.arange(4 * count, dtype=np.uint64) * 2_654_435_761 + 97).astype(np.uint32)
        arrays += [mx.ones((1, 1, 4, 1), mx.float16), mx.array(codes).reshape(1, 1, 4, count)]
    rows = [np.array(each) for each in _unpacked(bits, widths, tuple(arrays))]
    return b"".join(np.rint(each * 64).astype(np.int16).tobytes() for each in rows)
