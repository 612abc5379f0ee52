"""The soak's verdicts, from rounds that are given by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from scripts.faults.own_server import MB, Held
from scripts.faults.soak import Round, misses


def rounds(
    rss: Sequence[float], files: Sequence[int] = (), threads: Sequence[int] = ()
) -> list[Round]:
    return [
        Round(
            250 * (number + 1),
            [
                Held(
                    "proxy",
                    int(each * MB),
                    files[number] if files else 20,
                    threads[number] if threads else 10,
                )
            ],
            *(5, 10, 7, 20),
        )
        for number, each in enumerate(rss)
    ]


@pytest.mark.parametrize("rise", [2, 2 / 3])
def test_memory_that_rises_by_more_than_one_percent_is_a_miss(rise: float) -> None:
    found = list(misses(rounds([50] * 3 + [100] * 2 + [100 + rise * at / 4 for at in range(5)])))
    assert [text for text in found if "rss grew" in text] == found
    assert len(found) == (rise > 1)


def test_kv_above_its_budget_is_a_miss_at_once() -> None:
    seen = rounds([1] * 10)
    assert not list(misses([*seen[:9], replace(seen[9], kv=10, disk=20)]))
    assert "above its budget" in next(misses([*seen[:9], replace(seen[9], kv=11)]))
    assert "above its budget" in next(misses([*seen[:9], replace(seen[9], disk=21)]))


def test_a_process_that_is_not_there_all_the_time_is_a_miss() -> None:
    seen = rounds([1] * 10)
    found = list(misses([*seen[:9], replace(seen[9], held=[])]))
    assert found == ["a process was not there all the time"]
