"""The bench of stored KV: what it calls an error, a changed answer and a byte."""

import mlx.core as mx
import pytest

from hearth.worker.kv.quantise_kv import LayerRows, QuantFormat
from hearth.worker.kv.turboquant import TurboFormat
from scripts.bench.stored_kv import Loss, formats

TOKENS = 10
RAW = tuple(
    LayerRows(tuple(mx.random.normal((1, 2, TOKENS, 64), key=mx.random.key(k)) for k in (a, a + 1)))
    for a in (0, 2)
)


def test_every_scheme_and_the_raw_rows_are_measured() -> None:
    names = [name for name, _ in formats(mx.bfloat16)]
    assert names[:3] == ["off", "uniform 8", "uniform 4"]
    assert names[3:8] == [f"turboquant {bits}" for bits in ("2", "2.5", "3", "3.5", "4")]


def test_raw_rows_lose_nothing_and_packed_ones_what_they_do() -> None:
    rows = {}
    for form in (None, QuantFormat(8, 64), QuantFormat(4, 64), TurboFormat(2, mx.float32)):
        loss = Loss("", form)
        back = loss.back(RAW)
        loss.compare((mx.zeros(4), [1]), (mx.zeros(4), [1]))
        assert [each.format for each in back] == [None, None]
        rows[form] = loss.row(TOKENS)
    off, eight, four, two = rows.values()
    assert (off["bytes/token"], off["K rel"], off["V rel"]) == ("2048", "0.000%", "0.000%")
    assert eight["bytes/token"] == "576" and four["bytes/token"] == "320"
    errors = [float(each["K rel"].rstrip("%")) for each in (eight, four, two)]
    assert errors == sorted(errors) and errors[0] < 1 and 8 < errors[1] < 11 and errors[2] > 30


@pytest.mark.parametrize(("tokens", "changed"), [([1, 2], "0/1"), ([1, 3], "1/1")])
def test_an_answer_is_changed_where_any_of_its_tokens_is(tokens: list[int], changed: str) -> None:
    loss = Loss("", None)
    loss.back(RAW)
    p, q = mx.log(mx.array([0.5, 0.5])), mx.log(mx.array([0.25, 0.75]))
    loss.compare((q, tokens), (p, [1, 2]))
    row = loss.row(TOKENS)
    assert row["changed"] == changed
    assert row["KL max"] == row["KL mean"] == "0.14"
