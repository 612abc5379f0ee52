"""Measures and compares ranks before a model is served on them: `hearth ranks check`.

Rank 0 asks, and every rank answers with what it found; nothing is loaded. Versions need no question
here: a rank with others is not let in.
"""

import functools
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from hearth.shared.errors import StartError
from hearth.shared.models.local_models import local_models, matching_whole
from hearth.shared.models.model_path import named_model
from hearth.shared.settings import Settings
from hearth.worker.engine.weights_identity import HashMemory, WeightsIdentity
from hearth.worker.ranks.follower_link import FollowerLink
from hearth.worker.ranks.leader_link import LeaderLink
from hearth.worker.ranks.rank_link import difference

ASKS: Final = 200
SMALL_SUMS: Final = 200
LARGE_SUMS: Final = 5
LARGE_BYTES: Final = 16 << 20
SUMMED: Final = ((1, 4096), (64, 4096), (7, 1031))  # shapes; the last one divides by nothing
DTYPES: Final = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One line of the report."""

    what: str
    found: str
    is_good: bool = True


def check_ranks(link: LeaderLink, group: Any, settings: Settings) -> Iterator[CheckRow]:
    """Yield what is found, as it is found. Rank 0, on the thread that joined the group."""
    yield CheckRow("ranks", f"{link.size}: {', '.join(link.hosts)}; versions are the same")
    told_us = statistics.median(_timed(lambda: link.ask("nothing"), ASKS)) / 2 * 1e6
    yield CheckRow("telling", f"{told_us:,.0f} us one way (median of {ASKS})")
    seconds = _median_sum(link, group, 1, SMALL_SUMS)
    yield CheckRow("a sum of one number", f"{seconds * 1e6:,.0f} us (median of {SMALL_SUMS})")
    seconds = _median_sum(link, group, LARGE_BYTES // 4, LARGE_SUMS)
    speed = f"{LARGE_BYTES / seconds / 1e6:,.0f} MB/s ({seconds * 1e3:,.0f} ms)"
    yield CheckRow(f"a sum of {LARGE_BYTES >> 20} MB", speed)
    yield _equal_bits(link, group)
    yield _equal_files(link, settings)


def follow_check(link: FollowerLink, group: Any, settings: Settings) -> None:
    """Answer what `check_ranks` asks, until rank 0 is gone."""
    digests: list[str] = []
    answers: dict[str, Callable[..., Any]] = {
        "nothing": lambda: None,
        "sums": functools.partial(_sums, group),
        "digest": lambda *case: digests.append(_digest(group, link.rank, *case)),
        "last digest": lambda: digests[-1],
        "files": lambda: _files(settings),
    }
    while True:
        operation = link.next()
        answer = answers[operation.name](*operation.arguments)
        if operation.is_asked:
            link.answer(answer)


def _timed(act: Callable[[], object], count: int) -> list[float]:
    """Return the seconds that each of `count` calls took."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return seconds


def _sums(group: Any, size: int, count: int) -> list[float]:
    """Sum arrays of `size` numbers over all ranks; return the seconds that each took."""
    ones = mx.ones(size)
    mx.eval(ones)
    return _timed(lambda: mx.eval(mx.distributed.all_sum(ones, group=group)), count)


def _median_sum(link: LeaderLink, group: Any, size: int, count: int) -> float:
    """Have all ranks sum as `_sums` does; return the median in seconds."""
    link.tell("sums", size, count)
    return statistics.median(_sums(group, size, count))


def _digest(group: Any, rank: int, dtype: str, shape: Sequence[int]) -> str:
    """Return a digest of the bits of a sum of what each rank draws for itself."""
    own = mx.random.normal(list(shape), key=mx.random.key(rank)).astype(DTYPES[dtype])
    total = mx.distributed.all_sum(own, group=group)
    return hashlib.blake2b(np.array(total.view(mx.uint8)).tobytes(), digest_size=16).hexdigest()


def _equal_bits(link: LeaderLink, group: Any) -> CheckRow:
    """Compare sums between ranks, and each with the same sum once more."""
    cases = [(dtype, list(shape)) for dtype in DTYPES for shape in SUMMED for _ in range(2)]
    own, others = [], []
    for case in cases:
        link.tell("digest", *case)
        own.append(_digest(group, 0, *case))
        others.append(link.ask("last digest"))
    differing = [
        f"{dtype} {shape}"
        for number, (dtype, shape) in enumerate(cases)
        if {own[number], *others[number]} != {own[number - number % 2]}
    ]
    found = ", ".join(differing) if differing else f"the same on all ranks ({len(cases)} sums)"
    return CheckRow("bits of sums", found, not differing)


def _files(settings: Settings) -> dict[str, str]:
    """Return the hash of each file of the model here; where it is not here, what is said of it."""
    try:
        named = named_model(settings.model_path)
        found = matching_whole(str(named), local_models()) if isinstance(named, str) else []
        directory = found[0].directory if found else Path(named)
        parts = WeightsIdentity(directory, HashMemory(settings.kv_cache_dir)).parts()
    except (StartError, OSError) as error:
        return {"model": str(error)}
    if not parts:
        return {"model": f"{settings.model_path} is not on this machine: hearth pull fetches it"}
    return dict(part.rsplit(" ", 1) for part in parts)


def _equal_files(link: LeaderLink, settings: Settings) -> CheckRow:
    own = _files(settings)
    for rank, theirs in enumerate(link.ask("files"), 1):
        if wrong := difference(own, theirs):
            return CheckRow("files", f"rank {rank} ({link.hosts[rank]}): {wrong}", False)
    is_here = "model" not in own
    found = f"{settings.model_path}: the same on all ranks ({len(own)} files)"
    return CheckRow("files", found if is_here else own["model"], is_here)
