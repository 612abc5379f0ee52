"""Packed rows in a file: read as they were in whatever formats, and refused where a label lies."""

import itertools
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.models.cache import KVCache

from hearth.worker.disk.file_format import Array, decode, encode
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.quantise_kv import (
    AFFINE_BITS,
    AFFINE_GROUP_SIZES,
    KVRows,
    LayerRows,
    PackedFormat,
    QuantFormat,
    TurboFormat,
)
from hearth.worker.kv.serialise_kv import UnreadableRecord, arrays_of, rows_from
from tests.helpers.records.disk_records import record

HEADS: Final = 2
TOKENS: Final = 5
WIDTH: Final = 64
DTYPES: Final = (mx.float32, mx.float16, mx.bfloat16)
UNIFORM: Final = [QuantFormat(bits, size) for bits in (4, 8) for size in (32, 64)]
TURBO_BITS: Final = (2, 2.5, 3, 3.5, 4, 5)
LABELS: Final = st.one_of(
    st.sampled_from(
        [
            *(
                "",
                "none",
                "4x32",
                "4x64",
                "8x32",
                "8x64",
                "8x128",
                "3x64",
                "0x64",
                "4x0",
                "99x9999",
            ),
            *("turboquant4-float32-00000000", "turboquant3.5-float32-00000000"),
        ]
    ),
    st.text("abturboqnx0123456789.-", max_size=30),
)


def raw_rows(seed: int, dtype: mx.Dtype, widths: tuple[int, ...], tokens: int) -> LayerRows:
    keys = [mx.random.key(2 * seed + part) for part in range(2)]
    return LayerRows(
        tuple(
            mx.random.normal((1, HEADS, tokens, width), key=key).astype(dtype)
            for width, key in zip(widths, keys, strict=True)
        )
    )


@st.composite
def layers(draw: st.DrawFn, widths: tuple[int, ...] = (32, 64, 96)) -> LayerRows:
    """Return rows of one layer, packed in any way, or not at all."""
    dtype = draw(st.sampled_from(DTYPES))
    each = st.sampled_from(widths)
    raw = raw_rows(draw(st.integers(0, 1000)), dtype, (draw(each), draw(each)), TOKENS)
    turbo = [TurboFormat(bits, dtype) for bits in TURBO_BITS]
    forms: list[PackedFormat | None] = [None, *UNIFORM, *turbo]
    return raw.converted(draw(st.sampled_from(forms)))


def read_again(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return arrays as they come back from a file's bytes."""
    one = record(count=TOKENS, arrays=arrays)
    file = np.frombuffer(b"".join(encode(one)), np.uint8)
    return decode(file, one.root, one.name).arrays


def same(one: LayerRows, other: LayerRows) -> bool:
    pairs = zip(one.arrays, other.arrays, strict=True)
    return one.format == other.format and all(
        mine.dtype == theirs.dtype and bool(mx.array_equal(mine, theirs)) for mine, theirs in pairs
    )


@settings(max_examples=settings.default.max_examples // 2)
@given(st.lists(layers(), min_size=1, max_size=4))
def test_layers_in_several_formats_come_back_bit_by_bit(kept: list[LayerRows]) -> None:
    mx.eval([rows.arrays for rows in kept])
    found = rows_from(read_again(arrays_of(KVRows(tuple(kept)))))
    assert len(found.layers) == len(kept)
    for mine, theirs in zip(kept, found.layers, strict=True):
        assert same(mine, theirs)
        assert same(mine.converted(None), theirs.converted(None))
        assert theirs.shapes == tuple(array.shape for array in mine.converted(None).arrays)


def model_of(dtype: mx.Dtype) -> LayerMap:
    """Return the map of a model whose one layer has rows of WIDTH elements."""
    cache = KVCache()
    cache.update_and_fetch(*raw_rows(0, dtype, (WIDTH, WIDTH), 3).arrays)
    return LayerMap([cache])


def readable(model: LayerMap, arrays: tuple[Array, ...]) -> KVRows | None:
    """Return what the cache would take of a file with these arrays."""
    try:
        rows = rows_from(read_again(arrays))
    except UnreadableRecord:
        return None
    return rows if model.are_rows(rows, 0, TOKENS) else None


def damaged(draw: st.DrawFn, arrays: tuple[Array, ...]) -> list[Array]:
    """Return arrays of which something is not what it was: labels, order, number, sizes, types."""
    kind = draw(st.sampled_from(["label", "one label", "drop", "swap", "cut", "type"]))
    at = draw(st.integers(0, len(arrays) - 1))
    label, found = draw(LABELS), list(arrays)
    if kind in ("label", "one label"):
        for number in range(len(found)) if kind == "label" else (at,):
            name = ".".join([*found[number].name.split(".", 2)[:2], label]).rstrip(".")
            found[number] = replace(found[number], name=name)
    elif kind == "drop":
        del found[at]
    elif kind == "swap":
        other = draw(st.integers(0, len(found) - 1))
        found[at], found[other] = found[other], found[at]
    elif kind == "cut":
        axis = draw(st.integers(0, 3))
        found[at] = replace(found[at], values=found[at].values.take([0], axis))
    else:
        found[at] = Array(found[at].name, "U8", found[at].values.view(np.uint8))
    return found


@st.composite
def packed_and_damaged(draw: st.DrawFn) -> tuple[LayerRows, tuple[Array, ...]]:
    rows = draw(layers((WIDTH,)))
    mx.eval(rows.arrays)
    found = damaged(draw, arrays_of(KVRows((rows,))))
    names = {array.name for array in found}
    return rows, tuple(found) if len(names) == len(found) else ()


@given(packed_and_damaged())
def test_a_label_that_lies_is_a_miss_and_never_other_rows(
    case: tuple[LayerRows, tuple[Array, ...]],
) -> None:
    rows, arrays = case
    raw = rows.converted(None)
    found = readable(model_of(raw.arrays[0].dtype), arrays)
    if found is not None:
        assert same(found.layers[0].converted(None), raw)


@pytest.mark.parametrize("form", UNIFORM, ids=str)
def test_bits_and_groups_that_go_together_as_well_are_refused(form: QuantFormat) -> None:
    rows = raw_rows(1, mx.float32, (WIDTH, WIDTH), TOKENS).converted(form)
    model, arrays = model_of(mx.float32), arrays_of(KVRows((rows,)))
    for bits, size in itertools.product(AFFINE_BITS, AFFINE_GROUP_SIZES):
        named = tuple(
            replace(each, name=f"0.{part}.{bits}x{size}") for part, each in enumerate(arrays)
        )
        found = readable(model, named)
        assert (found is not None) == ((bits, size) == (form.bits, form.group_size))


@pytest.mark.parametrize("form", [None, UNIFORM[0], TurboFormat(4, mx.float32)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 5, 64), (1, 2, 4, 64), (1, 2, 5, 32), (2, 2, 5, 64)])
def test_rows_of_another_model_or_of_other_tokens_are_refused(
    form: PackedFormat | None, shape: tuple[int, ...]
) -> None:
    rows = LayerRows((mx.ones(shape), mx.ones(shape))).converted(form)
    assert rows.format == form
    assert readable(model_of(mx.float32), arrays_of(KVRows((rows,)))) is None


def test_what_other_code_packed_is_refused(monkeypatch: Any) -> None:
    form = TurboFormat(4, mx.float32)
    rows = raw_rows(1, mx.float32, (WIDTH, WIDTH), TOKENS).converted(form)
    arrays = arrays_of(KVRows((rows,)))
    model = model_of(mx.float32)
    assert readable(model, arrays) is not None
    monkeypatch.setattr("hearth.worker.kv.quantise_kv._sample", lambda bits, widths: b"others")
    assert readable(model, arrays) is None
    monkeypatch.undo()
    monkeypatch.setattr("hearth.worker.kv.quantise_kv.has_vision", lambda: False)
    assert readable(model, arrays) is None
