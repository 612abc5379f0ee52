"""Chooses which sequences share a decode step, by the bytes that the step reads, and which a trunk.

A batch reads the weights once for all its rows, and pads every row to its longest. Two batches read
the weights twice, and pad less. A trunk is kept once in place of once for each of its rows, and a
step reads it once. Pure functions; lengths are in tokens.
"""

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlx.utils import tree_flatten

from hearth.worker.engine.decode.decoding_sequence import DecodingSequence as DecodingSequence
from hearth.worker.engine.decode.shared_trunk import Trunk

# Rows are copied to be regrouped, which has to pay: groups stay as long as they read no more.
STAY: Final = 1.05
TRUNK_TOKENS_MIN: Final = 1024
# Rows are copied to be put on another trunk, which has to pay.
GAIN_MIN: Final = 1.25
EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
CHOSEN_COUNTS: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


@dataclass(frozen=True, slots=True)
class RowLength:
    """What a step reads of one row: its own tokens, and a trunk, once for all that share it."""

    own: int
    trunk: Hashable | None = None
    trunk_length: int = 0


@dataclass(frozen=True, slots=True)
class ReadCost:
    """Tells how many bytes a decode step of several rows reads. Immutable.

    Left as it is, padding costs nothing, so that all share one batch.
    """

    weight_bytes: float = 1.0  # that each step reads, whatever its rows
    expert_bytes: float = 0.0  # of all routed experts
    expert_share: float = 1.0  # of the experts that one row chooses
    row_bytes: float = 0.0  # of a token, in layers that keep every token
    window: int = 0  # tokens that sliding layers look back
    window_row_bytes: float = 0.0  # of a token, in those layers

    def weights(self, rows: int) -> float:
        """Return the bytes of weights that a step of `rows` reads: each row chooses its experts."""
        return self.weight_bytes + self.expert_bytes * (1 - (1 - self.expert_share) ** rows)

    def step(self, rows: int, longest: int) -> float:
        """Return the bytes that a step of `rows` reads, all padded to the longest."""
        window = min(longest, self.window) * self.window_row_bytes
        return self.weights(rows) + rows * (longest * self.row_bytes + window)

    def of(self, groups: Iterable[Sequence[RowLength]]) -> float:
        """Return the bytes that steps of these groups of rows read together."""
        return sum(
            self.step(len(group), max(row.own for row in group))
            + self.row_bytes * sum({row.trunk: row.trunk_length for row in group}.values())
            for group in groups
        )


def read_cost(
    network: Any, config: Mapping[str, Any], row_bytes: int, window: int, window_row_bytes: int
) -> ReadCost:
    """Return the cost of a loaded model's steps. `config` is its config.json's.

    `network` is upstream's module, whose experts' weights are in its Switch layers.

    Embeddings that are not the output layer too are looked up, not read. Where a config does not
    say how many experts a token chooses, all are counted as read.
    """
    sizes = [(name, array.nbytes) for name, array in tree_flatten(network.parameters())]
    has_head = any("lm_head" in name for name, _ in sizes)
    looked_up = sum(n for name, n in sizes if has_head and "embed_tokens" in name)
    experts = sum(
        array.nbytes
        for _, module in network.named_modules()
        if "SwitchLinear" in type(module).__name__
        for _, array in tree_flatten(module.parameters())
    )
    text = config.get("text_config", config)
    count = next((text[name] for name in EXPERT_COUNTS if text.get(name)), 0)
    chosen = next((text[name] for name in CHOSEN_COUNTS if text.get(name)), 0)
    return ReadCost(
        weight_bytes=sum(n for _, n in sizes) - experts - looked_up,
        expert_bytes=experts,
        expert_share=min(1.0, chosen / count) if count and chosen else 1.0,
        row_bytes=row_bytes,
        window=window,
        window_row_bytes=window_row_bytes,
    )


def split(rows: Sequence[RowLength], cost: ReadCost, rows_max: int) -> list[list[int]]:
    """Return the groups of indices into `rows` whose steps together read the fewest bytes.

    None has more than `rows_max`. Each is in ascending order, and so are they by their first.
    Neighbours by length share: a group of others could swap rows for shorter padding (which may
    read a trunk once more, so that with trunks this is a good grouping, not always the best). The
    best grouping of the n shortest follows from those of fewer, in n * rows_max sums.
    """
    order = sorted(range(len(rows)), key=lambda index: (rows[index].own, rows[index].trunk_length))
    weights = [cost.weights(count) for count in range(min(rows_max, len(order)) + 1)]
    best, begins = [0.0], [0]  # by how many of the shortest are grouped
    for end, index in enumerate(order, 1):
        a_row = cost.step(1, rows[index].own) - weights[1]
        trunks: dict[Hashable, int] = {}
        found = []
        for first in range(end - 1, max(0, end - rows_max) - 1, -1):
            row = rows[order[first]]
            trunks[row.trunk] = row.trunk_length
            shared = cost.row_bytes * sum(trunks.values())
            step = weights[end - first] + (end - first) * a_row + shared
            found.append((best[first] + step, first))
        least, first = min(found)
        best.append(least)
        begins.append(first)
    groups, end = [], len(order)
    while end:
        groups.append(sorted(order[begins[end] : end]))
        end = begins[end]
    return sorted(groups)


def regroup(
    groups: Sequence[Sequence[RowLength]],
    cost: ReadCost,
    rows_max: int,
    planned: Sequence[RowLength] | None = None,
) -> list[list[int]] | None:
    """Return a better grouping of rows, as indices into all of them in order; None: stay.

    `groups` are the rows that share a step now; `planned` is each of them, in order, as it may be
    once they are regrouped. None: as it is.
    """
    rows = [row for group in groups for row in group] if planned is None else planned
    wanted = split(rows, cost, rows_max)
    best = cost.of([rows[index] for index in group] for group in wanted)
    return None if cost.of(groups) <= STAY * best else wanted


def plan_trunks(rows: Sequence[DecodingSequence], tokens_min: int) -> dict[str, Trunk]:
    """Return the trunk of each row that should stand on one. Who has one does not lose it.

    A trunk has at least `tokens_min` tokens, and each row at least one token behind it. Of a row
    its key, lineage, prompt, tokens and trunk are looked at.
    """
    planned = {row.request_id: row.trunk for row in rows if row.trunk is not None}
    families: dict[Hashable, list[DecodingSequence]] = {}
    for row in rows:
        if row.lineage is not None:
            families.setdefault(row.lineage, []).append(row)
    for family in families.values():
        family.sort(key=lambda row: row.prompt.astype(">u4").tobytes())
        shared = [common(one, other) for one, other in itertools.pairwise(family)]
        for group, length in _groups(family, shared, tokens_min):
            trunk = _kept(group, length) or Trunk(length)
            planned |= dict.fromkeys((row.request_id for row in group), trunk)
    return planned


def _kept(group: Iterable[DecodingSequence], length: int) -> Trunk | None:
    """Return the trunk of some row that all of a group can stand on, if none longer is worth it."""
    found = [row.trunk for row in group if row.trunk is not None]
    fitting = [trunk for trunk in found if trunk.length <= length]
    best = max(fitting, key=lambda trunk: trunk.length, default=None)
    is_worth = best and (set(found) == {best} or length < GAIN_MIN * best.length)
    return best if is_worth else None


def _groups(
    rows: list[DecodingSequence], shared: list[int], tokens_min: int
) -> list[tuple[list[DecodingSequence], int]]:
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


def common(one: DecodingSequence, other: DecodingSequence) -> int:
    """Return how many tokens two rows begin with alike, each with one more behind them."""
    count = min(len(one.prompt), len(other.prompt))
    differing = one.prompt[:count] != other.prompt[:count]
    alike = int(differing.argmax()) if differing.any() else count
    return min(alike, len(one.tokens) - 1, len(other.tokens) - 1)
