"""Chooses which rows share a trunk, and how long it is. Pure functions; lengths are in tokens.

A trunk is kept once in place of once for each of its rows, and a step reads it once.
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hearth.worker.engine.decode.shared_trunk import Trunk

TRUNK_TOKENS_MIN: Final = 1024
# Rows are copied to be put on another trunk, which has to pay.
GAIN_MIN: Final = 1.25


@dataclass(frozen=True, slots=True)
class TrunkRow:
    """One row as the plan sees it. `held` are the tokens of its KV, the prompt's first."""

    key: str
    lineage: Hashable | None  # rows of equal ones may share the KV of equal tokens; None: nobody
    prompt: NDArray[np.int64]
    held: int
    trunk: Trunk | None  # that it stands on now


def plan_trunks(rows: Sequence[TrunkRow], tokens_min: int) -> dict[str, Trunk]:
    """Return the trunk of each row that should stand on one. Who has one does not lose it.

    A trunk has at least `tokens_min` tokens, and each row at least one token behind it.
    """
    planned = {row.key: row.trunk for row in rows if row.trunk is not None}
    families: dict[Hashable, list[TrunkRow]] = {}
    for row in rows:
        if row.lineage is not None:
            families.setdefault(row.lineage, []).append(row)
    for family in families.values():
        family.sort(key=lambda row: row.prompt.astype(">u4").tobytes())
        shared = [common(one, other) for one, other in itertools.pairwise(family)]
        for group, length in _groups(family, shared, tokens_min):
            trunk = _kept(group, length) or Trunk(length)
            planned.update((row.key, trunk) for row in group)
    return planned


def _kept(group: Iterable[TrunkRow], length: int) -> Trunk | None:
    """Return the trunk of some row that all of a group can stand on, if none longer is worth it."""
    found = [row.trunk for row in group if row.trunk is not None]
    fitting = [trunk for trunk in found if trunk.length <= length]
    best = max(fitting, key=lambda trunk: trunk.length, default=None)
    if best is None:
        return None
    is_of_all = all(trunk is best for trunk in found)
    return best if is_of_all or length < GAIN_MIN * best.length else None


def _groups(
    rows: list[TrunkRow], shared: list[int], tokens_min: int
) -> list[tuple[list[TrunkRow], int]]:
    """Return groups of sorted rows, and what each has in common, that spare the most tokens.

    `shared` is what neighbours have in common. A group is cut where that is least, if its parts
    spare more than it does.
    """
    if len(rows) < 2:
        return []
    length = min(shared)
    cut = shared.index(length) + 1
    parts = _groups(rows[:cut], shared[: cut - 1], tokens_min)
    parts += _groups(rows[cut:], shared[cut:], tokens_min)
    spared = sum((len(part) - 1) * tokens for part, tokens in parts)
    if length < tokens_min or spared > (len(rows) - 1) * length:
        return parts
    return [(rows, length)]


def common(one: TrunkRow, other: TrunkRow) -> int:
    """Return how many tokens two rows begin with alike, each with one more behind them."""
    count = min(len(one.prompt), len(other.prompt))
    differing = one.prompt[:count] != other.prompt[:count]
    alike = int(differing.argmax()) if differing.any() else count
    return min(alike, one.held - 1, other.held - 1)
