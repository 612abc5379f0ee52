"""Values as the page writes them: their digits are those that were measured."""

import re

import pytest
from hypothesis import example, given, strategies as st

from hearth.commands.bench.measures import Unit
from hearth.commands.bench.page.value_format import about, brief, counted, listed, shown, spread
from hearth.commands.bench.page.value_scale import LEFT, RIGHT, ValueScale

REAL = st.floats(1e-4, 1e12)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (41_203.0, Unit.TOKENS, "41,203"),
        (0.0, Unit.TOKENS, "0"),
        (2.5, Unit.TOKENS, "2.50"),
        (1.004, Unit.TIMES, "1.00×"),
        (0.9999, Unit.SHARE, "> 99.9 %"),
        (1.0, Unit.SHARE, "100 %"),
        (0.0312, Unit.SECONDS, "31.2 ms"),
        (1.5, Unit.SECONDS, "1.50 s"),
        (3_000.0, Unit.SECONDS, "50 min"),
        (544e6, Unit.BYTES, "544 MB"),
        (0.0, Unit.BYTES, "0 B"),
        (12.34, Unit.JOULES, "12.3 J"),
        (290.4, Unit.PER_SECOND, "290/s"),
    ],
)
def test_a_value_has_its_unit(value: float, unit: Unit, text: str) -> None:
    assert shown(value, unit) == text


def test_a_range_says_its_unit_once() -> None:
    assert spread(34.8, 37.4, Unit.SECONDS) == "34.8–37.4 s"
    assert spread(0.05, 0.2, Unit.SECONDS) == "50.0 ms–0.200 s"
    assert spread(10.0, 10.001, Unit.SECONDS) == "", "it reads the same"
    assert about(95, 105, 100) == "±\u202f5.0 %"
    assert about(1, 1, 1) == ""
    assert about(1_000, 1_001, 1_000) == "<\u202f0.1 %"


def test_names_and_counts_read_as_sentences_have_them() -> None:
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert [counted(1, "line"), counted(2_000, "line")] == ["1 line", "2,000 lines"]
    assert brief(41_203) == "41.2 k"


@given(REAL, st.sampled_from([Unit.TOKENS, Unit.TIMES, Unit.BYTES, Unit.SECONDS, Unit.PER_SECOND]))
def test_what_is_shown_is_near_the_value(value: float, unit: Unit) -> None:
    text = shown(value, unit)
    told = re.fullmatch(r"([\d.,]+)\s*(GB|MB|kB|B|ms|s|min|×|/s)?", text)
    assert told is not None, text
    size = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "ms": 1e-3, "min": 60.0}.get(told[2], 1.0)
    read = float(told[1].replace(",", "")) * size
    assert abs(read - value) <= max(0.051 * value, 0.51 if unit is Unit.BYTES else 0.006)


@given(st.lists(st.floats(0, 1e9), min_size=1))
@example([5e-324])
def test_every_value_has_a_place_on_its_axis_in_order(values: list[float]) -> None:
    scale = ValueScale.of(values)
    places = [scale.place(each) for each in sorted(values)]
    assert places == sorted(places)
    assert all(LEFT <= each <= RIGHT for each in places)
    assert len(scale.ticks()) <= 12
    assert all(LEFT <= scale.place(each) <= RIGHT for each in scale.ticks())
    assert scale.is_log or scale.low == 0.0, "lengths on a straight axis compare"


def test_an_axis_bends_where_the_least_could_not_be_seen() -> None:
    assert ValueScale.of([1, 1_000]).is_log
    assert not ValueScale.of([1, 20]).is_log
    assert not ValueScale.of([0, 1_000]).is_log
    assert ValueScale.of([1, 1_000]).ticks() == [1, 10, 100, 1_000]
