"""Makes arrays of rows of tokens, the shorter ones padded at their end."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from hearth.worker.embeddings.token_rows import TokenRow


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Rows of one length, the shorter ones padded at their end. All arrays are (rows, tokens)."""

    ids: mx.array
    mask: mx.array  # 1 = a token, 0 = padding
    types: mx.array | None


def pad(rows: Sequence[TokenRow], pad_id: int) -> PaddedBatch:
    """Return the batch of some rows."""
    length = max(len(row.ids) for row in rows)
    ids = [[*row.ids, *[pad_id] * (length - len(row.ids))] for row in rows]
    mask = [[1] * len(row.ids) + [0] * (length - len(row.ids)) for row in rows]
    types = None
    if all(row.types is not None for row in rows):
        types = mx.array([[*(row.types or ()), *[0] * (length - len(row.ids))] for row in rows])
    return PaddedBatch(mx.array(ids), mx.array(mask), types)
