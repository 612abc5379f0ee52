"""Makes arrays of rows of tokens, the shorter ones padded at their end."""

from collections.abc import Sequence

import mlx.core as mx

from hearth.worker.embeddings.token_rows import TokenRow


def pad(rows: Sequence[TokenRow], pad_id: int) -> tuple[mx.array, mx.array, mx.array | None]:
    """Return the ids of some rows, a mask (1 = a token, 0 = padding) and types, if all have them.

    All are (rows, tokens).
    """
    length = max(len(row.ids) for row in rows)
    ids = [[*row.ids, *[pad_id] * (length - len(row.ids))] for row in rows]
    mask = [[1] * len(row.ids) + [0] * (length - len(row.ids)) for row in rows]
    types = None
    if all(row.types is not None for row in rows):
        types = mx.array([[*(row.types or ()), *[0] * (length - len(row.ids))] for row in rows])
    return mx.array(ids), mx.array(mask), types
