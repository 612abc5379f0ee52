"""Measures on one rank what `hearth ranks check` compares: times and bits of sums, and files.

Rank 0 asks, and every rank answers with its results; no model is loaded. Versions are not compared
here, because a rank with other versions cannot join.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Sequence
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

DTYPES: Final = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def follow_check(link: FollowerLink, group: Any, settings: Settings) -> None:
    """Answer the operations of `check_ranks` until rank 0 is gone."""
    digests: list[str] = []
    answers: dict[str, Callable[..., Any]] = {
        "nothing": lambda: None,
        "sums": functools.partial(sum_times, group),
        "digest": lambda *case: digests.append(sum_digest(group, link.rank, *case)),
        "last digest": lambda: digests[-1],
        "files": lambda: file_hashes(settings),
    }
    while True:
        operation = link.next()
        answer = answers[operation.name](*operation.arguments)
        if operation.is_asked:
            link.answer(answer)


def timed(act: Callable[[], object], count: int) -> list[float]:
    """Return the seconds that each of `count` calls took."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return seconds


def sum_times(group: Any, size: int, count: int) -> list[float]:
    """Sum arrays of `size` numbers over all ranks; return the seconds of each sum."""
    ones = mx.ones(size)
    mx.eval(ones)
    return timed(lambda: mx.eval(mx.distributed.all_sum(ones, group=group)), count)


def sum_digest(group: Any, rank: int, dtype: str, shape: Sequence[int]) -> str:
    """Return a digest of the bits of a sum over all ranks; each rank draws its own numbers."""
    own = mx.random.normal(list(shape), key=mx.random.key(rank)).astype(DTYPES[dtype])
    total = mx.distributed.all_sum(own, group=group)
    return hashlib.blake2b(np.array(total.view(mx.uint8)).tobytes(), digest_size=16).hexdigest()


def file_hashes(settings: Settings) -> dict[str, str]:
    """Return the hash of each file of the model here, or {"model": reason} without a model."""
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
