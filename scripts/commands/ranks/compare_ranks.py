"""Measures and compares ranks before a model is served on them, for `hearth ranks check`."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from hearth.shared.settings import Settings
from hearth.worker.ranks.leader_link import LeaderLink
from hearth.worker.ranks.rank_check import DTYPES, file_hashes, sum_digest, sum_times, timed
from hearth.worker.ranks.rank_link import difference

ASKS: Final = 200
SMALL_SUMS: Final = 200
LARGE_SUMS: Final = 5
LARGE_BYTES: Final = 16 << 20
SUMMED: Final = ((1, 4096), (64, 4096), (7, 1031))  # shapes; the last one divides by nothing


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One line of the report."""

    what: str
    found: str
    is_good: bool = True


def check_ranks(link: LeaderLink, group: Any, settings: Settings) -> Iterator[CheckRow]:
    """Yield what is found, as it is found. Rank 0, on the thread that joined the group."""
    yield CheckRow("ranks", f"{link.size}: {', '.join(link.hosts)}; versions are the same")
    told_us = statistics.median(timed(lambda: link.request("nothing"), ASKS)) / 2 * 1e6
    yield CheckRow("telling", f"{told_us:,.0f} us one way (median of {ASKS})")
    seconds = _median_sum(link, group, 1, SMALL_SUMS)
    yield CheckRow("a sum of one number", f"{seconds * 1e6:,.0f} us (median of {SMALL_SUMS})")
    seconds = _median_sum(link, group, LARGE_BYTES // 4, LARGE_SUMS)
    speed = f"{LARGE_BYTES / seconds / 1e6:,.0f} MB/s ({seconds * 1e3:,.0f} ms)"
    yield CheckRow(f"a sum of {LARGE_BYTES >> 20} MB", speed)
    yield _equal_bits(link, group)
    yield _equal_files(link, settings)


def _median_sum(link: LeaderLink, group: Any, size: int, count: int) -> float:
    """Have all ranks sum as `sum_times` does; return the median in seconds."""
    link.send("sums", size, count)
    return statistics.median(sum_times(group, size, count))


def _equal_bits(link: LeaderLink, group: Any) -> CheckRow:
    """Compare sums between ranks, and each with the same sum once more."""
    cases = [(dtype, list(shape)) for dtype in DTYPES for shape in SUMMED for _ in range(2)]
    own, others = [], []
    for case in cases:
        link.send("digest", *case)
        own.append(sum_digest(group, 0, *case))
        others.append(link.request("last digest"))
    differing = [
        f"{dtype} {shape}"
        for number, (dtype, shape) in enumerate(cases)
        if {own[number], *others[number]} != {own[number - number % 2]}
    ]
    found = ", ".join(differing) if differing else f"the same on all ranks ({len(cases)} sums)"
    return CheckRow("bits of sums", found, not differing)


def _equal_files(link: LeaderLink, settings: Settings) -> CheckRow:
    own = file_hashes(settings)
    for rank, theirs in enumerate(link.request("files"), 1):
        if wrong := difference(own, theirs):
            return CheckRow("files", f"rank {rank} ({link.hosts[rank]}): {wrong}", False)
    is_here = "model" not in own
    found = f"{settings.model_path}: the same on all ranks ({len(own)} files)"
    return CheckRow("files", found if is_here else own["model"], is_here)
