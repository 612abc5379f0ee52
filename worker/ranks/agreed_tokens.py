"""Has all ranks say the tokens that rank 0 has chosen: a sum, to which the others add nothing.

Why no rank ever waits in one collective while another is in the next, though nobody looks:
  - Each rank does the operations that it is told, one after another, and an operation evaluates
    the same graphs of the same shapes in the same order everywhere: the code is the same, and what
    it decides by (lengths, memory, who joins whom) rank 0 decides and tells.
  - The collectives of a forward depend on each other from layer to layer. Two that do not (an
    expert that all tokens read, beside the chosen ones) come in the order of MLX's evaluation,
    which follows from the graph alone. So logits are evaluated by themselves, here: what rank 0
    samples with, which the others have not, is another graph.
  - Of a prefill's forward all ranks evaluate the KV and nothing else, likewise.
Nothing else on a rank depends on a collective that was not begun with one of these.

The sums have no `stream`: with none MLX takes the default stream of the CPU, where the ring, MPI
and JACCL work (`communication_stream` in mlx/distributed/distributed_impl.h), and computing waits
for it. On a Mac's GPU stream there is no sum at all.
Owner: the inference thread.
"""

import functools
import zlib
from collections.abc import Callable, Sequence

import mlx.core as mx

from hearth.worker.cache.block_hash import pack
from hearth.worker.ranks.follower_link import FollowerLink
from hearth.worker.ranks.leader_link import LeaderLink
from hearth.worker.ranks.rank_link import RankMismatch

Sum = Callable[[mx.array], mx.array]  # over all ranks


def checksum(ids: Sequence[int]) -> int:
    """Return what tells these ids from others; both sides witness it of what they feed."""
    return zlib.crc32(pack(ids).tobytes())


def said_facts(ids: Sequence[int]) -> tuple[str, int, int]:
    """Return what both sides witness of the tokens of a step: none of them, as facts are shown."""
    return "said", len(ids), checksum(ids)


def sum_over(group: mx.distributed.Group) -> Sum:
    """Return the sum over the ranks of a group."""
    return functools.partial(mx.distributed.all_sum, group=group)


class LeadingTokens:
    """Rank 0's tokens, told to the other ranks; see `decoding_sequence.Agree`."""

    def __init__(self, link: LeaderLink, total: Sum) -> None:
        self._link = link
        self._total = total
        self._unchecked: list[tuple[mx.array, mx.array]] = []  # chosen here, and the sum

    def __call__(self, logits: mx.array, tokens: mx.array) -> mx.array:
        self._link.witness("forward", tokens.shape[0])
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        said = self._total(tokens)
        self._unchecked.append((tokens, said))
        return said

    def take(self) -> list[tuple[mx.array, mx.array]]:
        """Return what was told and not checked yet: of forwards whose tokens are said next."""
        pairs, self._unchecked = self._unchecked, []
        return pairs


def check_sums(pairs: list[tuple[mx.array, mx.array]]) -> None:
    """Raise RankMismatch where another rank has added something to rank 0's tokens.

    Its text comes to the log and to whoever waits: it names no token.
    """
    for chosen, said in pairs:
        if chosen.tolist() != said.tolist():
            rows = chosen.shape[0]
            raise RankMismatch(f"of {rows} tokens that rank 0 chose all ranks said others")


class FollowingTokens:
    """A follower's tokens: rank 0's."""

    def __init__(self, link: FollowerLink, total: Sum) -> None:
        self._link = link
        self._total = total

    def __call__(self, logits: mx.array, tokens: mx.array) -> mx.array:
        self._link.witness("forward", tokens.shape[0])
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        # It waits for the logits, as rank 0's tokens do.
        (nothing,) = mx.depends([mx.zeros(tokens.shape, mx.uint32)], [logits])
        return self._total(nothing)
