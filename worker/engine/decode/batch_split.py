"""Chooses which sequences share a decode step, by the bytes read, and which share a trunk.

A batch reads the weights once for all its rows, and pads every row to the longest. Two batches read
the weights twice, and pad less. A trunk is kept once for all its rows, and a step reads it once.
Pure functions. A row is a batch row, and lengths are in tokens.
"""

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlx.utils import tree_flatten

from hearth.worker.engine.decode.decoding_sequence import DecodingSequence as DecodingSequence
from hearth.worker.engine.decode.shared_trunk import Trunk

# Regrouping copies KV. So groups stay while they read at most this many times the bytes of the best
# grouping.
STAY: Final = 1.05
TRUNK_TOKENS_MIN: Final = 1024
# A change of trunk copies KV. So the new trunk has to be at least this many times as long.
GAIN_MIN: Final = 1.25
EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
CHOSEN_COUNTS: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


@dataclass(frozen=True, slots=True)
class RowLength:
    """What a step reads of one batch row: its own tokens, and its trunk (once for all rows)."""

    own: int
    trunk: Hashable | None = None
    trunk_length: int = 0


@dataclass(frozen=True, slots=True)
class ReadCost:
    """Estimates how many bytes a decode step of several batch rows reads. Immutable.

    With the defaults padding costs nothing, so that all sequences share one batch.
    """

    weight_bytes: float = 1.0  # weights that each step reads, without the routed experts
    expert_bytes: float = 0.0  # bytes of all routed experts
    expert_share: float = 1.0  # share of the experts that one row chooses
    row_bytes: float = 0.0  # KV of a token in layers that keep every token
    window: int = 0  # tokens that sliding layers look back
    window_row_bytes: float = 0.0  # KV of a token in sliding layers

    def weights(self, rows: int) -> float:
        """Return the bytes of weights that a step of `rows` reads. Each row chooses its experts."""
        return self.weight_bytes + self.expert_bytes * (1 - (1 - self.expert_share) ** rows)

    def step(self, rows: int, longest: int) -> float:
        """Return the bytes that a step of `rows` reads, all padded to `longest` tokens."""
        window = min(longest, self.window) * self.window_row_bytes
        return self.weights(rows) + rows * (longest * self.row_bytes + window)

    def of(self, groups: Iterable[Sequence[RowLength]]) -> float:
        """Return the bytes that one step of each group reads, summed."""
        return sum(
            self.step(len(group), max(row.own for row in group))
            + self.row_bytes * sum({row.trunk: row.trunk_length for row in group}.values())
            for group in groups
        )


def read_cost(
    network: Any, config: Mapping[str, Any], row_bytes: int, window: int, window_row_bytes: int
) -> ReadCost:
    """Return the cost of a loaded model's steps. `config` is the content of its config.json.

    `network` is upstream's module. The weights of its experts are in its Switch layers.
    Embeddings are looked up, not read, unless they are the output layer too. Where `config` does
    not say how many experts a token chooses, all experts count as read.
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

    A group has at most `rows_max` rows. Indices ascend within a group, and groups ascend by
    their first index.
    Only neighbours in order of length are grouped: two groups that overlap in length could swap
    rows for less padding. With trunks such a swap may read a trunk twice, so the grouping is then
    good, but not always the best. The best grouping of the n shortest rows follows from the best
    groupings of fewer rows, in n * rows_max sums.
    """
    order = sorted(range(len(rows)), key=lambda index: (rows[index].own, rows[index].trunk_length))
    weights = [cost.weights(count) for count in range(min(rows_max, len(order)) + 1)]
    best, begins = [0.0], [0]  # index n: for the n shortest rows
    for end, index in enumerate(order, 1):
        kv_bytes = cost.step(1, rows[index].own) - weights[1]
        trunks: dict[Hashable, int] = {}
        found = []
        for first in range(end - 1, max(0, end - rows_max) - 1, -1):
            row = rows[order[first]]
            trunks[row.trunk] = row.trunk_length
            shared = cost.row_bytes * sum(trunks.values())
            step = weights[end - first] + (end - first) * kv_bytes + shared
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
    """Return a better grouping, as indices into all rows in order; None = keep the groups.

    `groups` are the rows that share a step now. `planned` has each row's length after
    regrouping, with the planned trunk, in the same order; None = no change.
    """
    rows = [row for group in groups for row in group] if planned is None else planned
    wanted = split(rows, cost, rows_max)
    best = cost.of([rows[index] for index in group] for group in wanted)
    return None if cost.of(groups) <= STAY * best else wanted


def plan_trunks(sequences: Sequence[DecodingSequence], tokens_min: int) -> dict[str, Trunk]:
    """Return the planned trunks by request id. A sequence with a trunk keeps it or gets another.

    A trunk has at least `tokens_min` tokens, and each sequence has at least one token after it.
    Only the request id, lineage, prompt, tokens and trunk of a sequence are read.
    """
    planned = {
        sequence.request_id: sequence.trunk for sequence in sequences if sequence.trunk is not None
    }
    families: dict[Hashable, list[DecodingSequence]] = {}
    for sequence in sequences:
        if sequence.lineage is not None:
            families.setdefault(sequence.lineage, []).append(sequence)
    for family in families.values():
        family.sort(key=lambda sequence: sequence.prompt.astype(">u4").tobytes())
        shared = [shared_length(first, second) for first, second in itertools.pairwise(family)]
        for group, length in _groups(family, shared, tokens_min):
            trunk = _trunk_to_keep(group, length) or Trunk(length)
            planned |= dict.fromkeys((sequence.request_id for sequence in group), trunk)
    return planned


def _trunk_to_keep(group: Iterable[DecodingSequence], length: int) -> Trunk | None:
    """Return a present trunk for the whole group; None where a new one of `length` pays."""
    found = [sequence.trunk for sequence in group if sequence.trunk is not None]
    fitting = [trunk for trunk in found if trunk.length <= length]
    best = max(fitting, key=lambda trunk: trunk.length, default=None)
    is_worth = best and (set(found) == {best} or length < GAIN_MIN * best.length)
    return best if is_worth else None


def _groups(
    sequences: list[DecodingSequence], shared: list[int], tokens_min: int
) -> list[tuple[list[DecodingSequence], int]]:
    """Return the groups of sorted sequences that save the most tokens, and their shared lengths.

    `shared` are the shared lengths of neighbours. The sequences are split at the least length if
    the parts save more than the whole.
    """
    if len(sequences) < 2:
        return []
    length = min(shared)
    cut = shared.index(length) + 1
    parts = _groups(sequences[:cut], shared[: cut - 1], tokens_min)
    parts += _groups(sequences[cut:], shared[cut:], tokens_min)
    saved = sum((len(part) - 1) * tokens for part, tokens in parts)
    if length < tokens_min or saved > (len(sequences) - 1) * length:
        return parts
    return [(sequences, length)]


def shared_length(first: DecodingSequence, second: DecodingSequence) -> int:
    """Return the length of the common beginning, with at least one token after it in each."""
    count = min(len(first.prompt), len(second.prompt))
    differing = first.prompt[:count] != second.prompt[:count]
    alike = int(differing.argmax()) if differing.any() else count
    return min(alike, len(first.tokens) - 1, len(second.tokens) - 1)
