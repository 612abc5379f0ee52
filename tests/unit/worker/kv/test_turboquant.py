"""TurboQuant's packing of rows: what comes back, what it takes, and what it leaves as it is."""

import mlx.core as mx
import pytest

from hearth.worker.kv.quantise_kv import LayerRows, TurboFormat

SHAPE = (1, 2, 20, 64)


def rows(dtype: mx.Dtype = mx.bfloat16, shape: tuple[int, ...] = SHAPE) -> LayerRows:
    arrays = [mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype) for seed in range(2)]
    return LayerRows(tuple(arrays))


def losses(raw: LayerRows, bits: float) -> list[float]:
    """Return the relative errors of the keys and of the values."""
    packed = raw.converted(TurboFormat(bits, raw.arrays[0].dtype))
    assert packed.format is not None
    found = []
    for was, back in zip(raw.arrays, packed.converted(None).arrays, strict=True):
        assert (back.shape, back.dtype) == (was.shape, was.dtype)
        one, other = was.astype(mx.float32), back.astype(mx.float32)
        found.append(float(mx.linalg.norm(one - other) / mx.linalg.norm(one)))
    return found


def test_more_bits_lose_less() -> None:
    found = [max(losses(rows(), bits)) for bits in (2, 3, 4, 6, 8)]
    assert found == sorted(found, reverse=True)
    assert 0.30 < found[0] < 0.37 and 0.08 < found[2] < 0.11 and found[4] < 0.02


def test_half_a_bit_goes_to_the_values() -> None:
    keys, values = losses(rows(), 3.5)
    assert (keys, values) == (losses(rows(), 3)[0], losses(rows(), 4)[1])


@pytest.mark.parametrize(("bits", "row_bits"), [(2, 128), (3.5, 224), (4, 256)])
def test_a_row_takes_its_bits_and_its_length(bits: float, row_bits: int) -> None:
    packed = rows().converted(TurboFormat(bits, mx.bfloat16))
    assert packed.part(0, 1).shapes == ((1, 2, 1, 64), (1, 2, 1, 64))
    size = sum(array.nbytes for array in packed.arrays)
    assert size == 2 * 20 * (2 * row_bits // 8 + 2 * 2)


def test_a_part_of_packed_rows_is_the_packed_part() -> None:
    form = TurboFormat(4, mx.bfloat16)
    whole = rows().converted(form).part(5, 12).converted(None)
    part = rows().part(5, 12).converted(form).converted(None)
    for one, other in zip(whole.arrays, part.arrays, strict=True):
        assert mx.array_equal(one, other)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(rows(shape=(1, 1, 4, 40)), id="of another width"),
        pytest.param(rows(shape=(1, 1, 4, 1_056)), id="too wide"),
        pytest.param(rows(mx.float16), id="of another type"),
        pytest.param(
            LayerRows(tuple(1e5 * array for array in rows().arrays)), id="too long for a float16"
        ),
    ],
)
def test_rows_that_cannot_be_packed_stay_as_they_are(raw: LayerRows) -> None:
    assert raw.converted(TurboFormat(4, mx.bfloat16)) is raw


def test_rows_of_nothing_come_back_as_nothing() -> None:
    raw = LayerRows((mx.zeros(SHAPE), mx.zeros(SHAPE)))
    back = raw.converted(TurboFormat(2, mx.float32)).converted(None)
    assert not any(mx.any(array).item() for array in back.arrays)
