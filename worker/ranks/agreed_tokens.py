"""Distributes rank 0's sampled tokens to all ranks by a sum to which the followers add zeros.

All ranks always meet in the same collective, without further synchronisation:
  - Each rank does the same operations in the same order, and an operation evaluates the same graphs
    with the same shapes on all ranks. The code is the same, and its inputs (lengths, memory, the
    requests that share a forward) come from rank 0.
  - The collectives of a forward depend on each other from layer to layer. Independent ones (such as
    a shared expert beside the routed ones) run in MLX's evaluation order, which depends on the
    graph alone. Only rank 0 has a sampling graph; therefore the logits are evaluated here first,
    without it.
  - In a prefill's forward all ranks evaluate the KV and nothing else.
No other computation on a rank depends on a collective.

The sums name no `stream`. MLX then takes the CPU's default stream, on which the ring, MPI and JACCL
work (`communication_stream` in mlx/distributed/distributed_impl.h), and the computation waits for
the sums. A Mac's GPU stream has no sums.
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
    """Return a checksum of the ids; both sides witness it for the tokens that they feed."""
    return zlib.crc32(pack(ids).tobytes())


def token_facts(ids: Sequence[int]) -> tuple[str, int, int]:
    """Return the facts to witness for a step's tokens; facts are logged, so they hold no token."""
    return "said", len(ids), checksum(ids)


def sum_over(group: mx.distributed.Group) -> Sum:
    """Return the function that sums an array over the ranks of a group."""
    return functools.partial(mx.distributed.all_sum, group=group)


class LeadingTokens:
    """Sends rank 0's tokens to the other ranks; see `decoding_sequence.Agree`."""

    def __init__(self, link: LeaderLink, total: Sum) -> None:
        self._link = link
        self._total = total
        self._unchecked: list[tuple[mx.array, mx.array]] = []  # (tokens sampled here, their sum)

    def __call__(self, logits: mx.array, tokens: mx.array) -> mx.array:
        self._link.witness("forward", tokens.shape[0])
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        summed = self._total(tokens)
        self._unchecked.append((tokens, summed))
        return summed

    def take_unchecked(self) -> list[tuple[mx.array, mx.array]]:
        """Return the (tokens, sum) pairs that were not checked yet, and forget them."""
        pairs, self._unchecked = self._unchecked, []
        return pairs


def check_sums(pairs: list[tuple[mx.array, mx.array]]) -> None:
    """Raise RankMismatch if another rank has added something to rank 0's tokens.

    The text names no token, because it reaches the log and clients.
    """
    for chosen, summed in pairs:
        if chosen.tolist() != summed.tolist():
            count = chosen.shape[0]
            raise RankMismatch(f"of {count} tokens that rank 0 chose all ranks said others")


class FollowingTokens:
    """Receives rank 0's tokens at a follower; see `decoding_sequence.Agree`."""

    def __init__(self, link: FollowerLink, total: Sum) -> None:
        self._link = link
        self._total = total

    def __call__(self, logits: mx.array, tokens: mx.array) -> mx.array:
        self._link.witness("forward", tokens.shape[0])
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        # The zeros depend on the logits, as rank 0's tokens do.
        (zeros,) = mx.depends([mx.zeros(tokens.shape, mx.uint32)], [logits])
        return self._total(zeros)
