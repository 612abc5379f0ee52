"""Holds texts as rows of tokens, and checks them against a model's limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hearth.shared.errors import RequestError


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The tokens of one text, or of a query and a document."""

    ids: Sequence[int]
    types: Sequence[int] | None = None  # which of the two each token is of; None = one text


class RowModel(Protocol):
    """Turns items of a request into rows of tokens, and these into numbers."""

    def rows(self, items: Sequence[Any], first: int, truncate: bool) -> list[TokenRow]:
        """Return the tokens of items, the first of which is number `first` of the request.

        Raises RequestError: the model cannot be given one of them.
        """

    def values(self, rows: Sequence[TokenRow]) -> NDArray[np.float32]:
        """Return what is computed of each row, (rows, values of one)."""


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
