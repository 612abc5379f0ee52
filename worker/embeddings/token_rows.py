"""Holds texts as rows of tokens, checks them against a model's limits, and pads a batch of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from hearth.shared.errors import RequestError


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The tokens of one text, or of a query and a document."""

    ids: Sequence[int]
    types: Sequence[int] | None = None  # which of the two each token is of; None = one text


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


def check_row(row: TokenRow, name: str, tokens_max: int, vocabulary: int) -> None:
    """Raise RequestError where the model cannot be given this row, which `name` calls.

    MLX checks no index: a token beyond the vocabulary would end the process.
    """
    count = len(row.ids)
    if not count:
        raise _refused(f"{name} is empty: there is nothing to embed. Leave it out.")
    if count > tokens_max:
        raise _refused(
            f"{name} is {count:,} tokens and the model takes {tokens_max:,}. Split it, or "
            f"remove at least {count - tokens_max:,} tokens.",
            code="context_length_exceeded",
        )
    if min(row.ids) < 0 or max(row.ids) >= vocabulary:
        raise _refused(
            f"{name} has a token id that is not one of this model's, from 0 to "
            f"{vocabulary - 1:,}. Send texts, or the ids of this model's own tokenizer."
        )


def _refused(text: str, code: str = "invalid_request") -> RequestError:
    return RequestError(text, code=code, param="input" if text.startswith("Input") else "documents")
