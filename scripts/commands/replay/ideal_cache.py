"""Computes what a perfect prefix cache would hit, with infinite memory for every prompt sent."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = Sequence[int]


def common_prefix(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Return how many leading tokens both share."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def ideal_cached(prompts: Sequence[Ids | None]) -> list[int | None]:
    """Return for each prompt the longest prefix that any prompt sent before it begins with.

    In the order of sending; whether the earlier one had ended does not matter. At most all but
    the last token, whose logits begin the answer. None stands for a prompt that was not served:
    it has no prefix and is nobody's.
    """
    known: list[NDArray[np.int64]] = []
    cached: list[int | None] = []
    for prompt in prompts:
        if prompt is None:
            cached.append(None)
            continue
        assert len(prompt) > 0, "a served prompt has tokens"
        ids = np.asarray(prompt, dtype=np.int64)
        longest = max((common_prefix(ids, earlier) for earlier in known), default=0)
        cached.append(min(longest, len(ids) - 1))
        known.append(ids)
    return cached


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of the values do not exceed; None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
