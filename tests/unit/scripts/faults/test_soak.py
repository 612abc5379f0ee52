"""The soak's verdicts, from rounds that are given by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from scripts.faults.own_server import MB, Held
from scripts.faults.soak import Round, growth_of, misses, round_of

ROW = {
    "memory_bytes": 90,
    "beside_arrays_bytes": 50,
    "speculation": {"bytes": 10},
    "bytes": 5,
    "budget_bytes": 10,
    "disk": {"directory_bytes_used": None, "bytes_max": 20},
}


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


def test_growth_is_the_slope_of_the_second_half() -> None:
    requests = list(range(1, 9))
    assert growth_of(requests, [10, 50, 90, 100, 101, 102, 103, 104]) == 3
    assert growth_of(requests, [10, 50, 90, 100, 100, 100, 100, 100]) == 0


def test_arrays_and_drafts_are_taken_off_the_worker() -> None:
    held = [Held("proxy", 100, 1, 1), Held("worker 0", 100, 1, 1)]
    told = round_of(3, held, ROW)
    assert [each.rss for each in told.held] == [100, 50]
    assert (told.kv, told.kv_budget, told.disk, told.disk_budget) == (5, 10, 0, 20)


@pytest.mark.parametrize("rise", [2, 2 / 3])
def test_memory_that_rises_by_more_than_one_percent_is_a_miss(rise: float) -> None:
    found = list(misses(rounds([50] * 3 + [100] * 2 + [100 + rise * at / 4 for at in range(5)])))
    assert [text for text in found if "rss grew" in text] == found
    assert len(found) == (rise > 1)


def test_one_high_round_is_no_growth() -> None:
    assert not list(misses(rounds([100] * 15 + [103] + [100] * 14)))


@pytest.mark.parametrize(("what", "most"), [("files", 2), ("threads", 5)])
def test_files_may_rise_by_two_and_threads_by_five(what: str, most: int) -> None:
    def found(rise: int) -> list[str]:
        risen = [10 + rise * max(0, at - 4) // 4 for at in range(9)]
        return list(misses(rounds([100] * 9, **{what: risen})))

    assert not found(most)
    (miss,) = found(2 * most)
    assert f"proxy: {what} grew by" in miss


def test_kv_above_its_budget_is_a_miss_at_once() -> None:
    seen = rounds([1] * 10)
    assert not list(misses([*seen[:9], replace(seen[9], kv=10, disk=20)]))
    assert "above its budget" in next(misses([*seen[:9], replace(seen[9], kv=11)]))
    assert "above its budget" in next(misses([*seen[:9], replace(seen[9], disk=21)]))


def test_a_process_that_is_not_there_all_the_time_is_a_miss() -> None:
    seen = rounds([1] * 10)
    found = list(misses([*seen[:9], replace(seen[9], held=[])]))
    assert found == ["a process was not there all the time"]
