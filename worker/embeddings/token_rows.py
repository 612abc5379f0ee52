"""Holds texts as rows of tokens, checks them against a model's limits, and pads them to arrays."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from hearth.shared.errors import RequestError

# Of one text: tokenised whole, a longer one takes gigabytes and holds up all others for minutes.
# At the most tokens that a model is given these are 64 characters a token.
CHARS_MAX: Final = 1 << 19


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The tokens of one text, or of a query and a document."""

    ids: Sequence[int]
    types: Sequence[int] | None = None  # which of the two each token is of; None = one text

    def packed(self) -> "TokenRow":
        """Return the same in four bytes a token, where a list takes some forty."""
        types = None if self.types is None else array("i", self.types)
        return TokenRow(array("i", self.ids), types)


def checked_text(text: str, name: str, param: str, truncate: bool) -> str:
    """Return a text that can be tokenised, cut where that is asked.

    Raises RequestError: it is longer than CHARS_MAX, and is not to be cut.
    """
    if len(text) > CHARS_MAX and not truncate:
        raise RequestError(
            f"{name} is {len(text):,} characters and this server takes {CHARS_MAX:,}. Split it.",
            code="context_length_exceeded",
            param=param,
        )
    return text[:CHARS_MAX]


def check_numbers(values: NDArray[np.float32]) -> None:
    """Raise RequestError where the model computed no number."""
    if not np.isfinite(values).all():
        raise RequestError("The model computed no number.", status=500, code="not_a_number")


def check_row(row: TokenRow, name: str, param: str, tokens_max: int, vocabulary: int) -> None:
    """Raise RequestError where the model cannot be given this row, which `name` calls.

    MLX checks no index: a token beyond the vocabulary would end the process.
    """
    count = len(row.ids)
    if not count:
        text = f"{name} is empty: there is nothing to embed. Leave it out."
        raise RequestError(text, param=param)
    if count > tokens_max:
        raise RequestError(
            f"{name} is {count:,} tokens and the model takes {tokens_max:,}. Split it, or "
            f"remove at least {count - tokens_max:,} tokens.",
            code="context_length_exceeded",
            param=param,
        )
    if min(row.ids) < 0 or max(row.ids) >= vocabulary:
        raise RequestError(
            f"{name} has a token id that is not one of this model's, from 0 to "
            f"{vocabulary - 1:,}. Send texts, or the ids of this model's own tokenizer.",
            param=param,
        )


def pad(rows: Sequence[TokenRow], pad_id: int) -> tuple[mx.array, mx.array, mx.array | None]:
    """Return the ids of some rows, a mask (1 = a token, 0 = padding) and types, if all have them.

    The shorter rows are padded at their end.
    All are (rows, tokens).
    """
    length = max(len(row.ids) for row in rows)
    ids = [[*row.ids, *[pad_id] * (length - len(row.ids))] for row in rows]
    mask = [[1] * len(row.ids) + [0] * (length - len(row.ids)) for row in rows]
    types = None
    if all(row.types is not None for row in rows):
        types = mx.array([[*(row.types or ()), *[0] * (length - len(row.ids))] for row in rows])
    return mx.array(ids), mx.array(mask), types
