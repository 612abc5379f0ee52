"""The declaration of a kind of layer cache: what it holds, and how that is taken out and put back.

Owner: the inference thread.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from hearth.worker.kv.quantise_kv import LayerRows

StateArrays = tuple[mx.array | None, ...]


class UnknownCache(Exception):
    """A layer's cache is of a class or shape that no kind declares."""


class LayerKind:
    """What the caches of one class hold, in three parts. A subclass overrides the parts it has.

    - *Rows* only grow. A row group is the arrays of one sort, with one row for every `rate` tokens
      and the rows on axis 2: (1, heads, rows, width). A row is written when its last token is read.
    - A *window* has the rows of the last tokens: (1, heads, tokens, width), oldest first.
    - A *state* belongs to one position, and a snapshot keeps it. It is all else that the next
      forward reads: recurrent states, and the pending tokens of a row that is not yet whole.

    Arrays that follow from these are derived: `put_rows`, `trim` or `put_state` resets them. Rows
    are put first, then the window, then the state.

    Three methods undo. `trim` takes a live cache back to an earlier position, and a window and a
    state of that position are put next. `cut` removes the last rows of a draft's forward. `back`
    takes a draft's whole forward back, to what `checkpoint` saved before it.
    """

    # Number of first row groups whose buffers get spare rows: such a class has KVCache's `keys`,
    # `values` and `offset`.
    presized: ClassVar[int] = 0
    # Attention reads the tokens with the best scores: rounding as small as that of decoded KV may
    # change the choice, so by default no decoded KV is reused.
    chooses_tokens: ClassVar[bool] = False
    is_prefill_only: ClassVar[bool] = False  # what decoding wrote cannot be reused at all
    merges: ClassVar[bool] = True  # each row of a batch gets the logits that it gets alone
    ragged: ClassVar[bool] = False  # states vary in length, such as m pending keys (1, m, width)
    rewinds: ClassVar[bool] = True  # there are `checkpoint` and `back`
    cuts: ClassVar[bool] = False  # there is `cut`: no layer's state is needed to drop some rows

    def probe_tokens(self, leaf: Any) -> int:
        """Return after how many tokens every array of this cache exists in its full size."""
        return 1

    def check(self, leaf: Any) -> None:
        """Raise UnknownCache if a filled cache of this class cannot be put back."""

    def depth(self, leaf: Any) -> int | None:
        """Return how many tokens the cache holds; None if it does not count them."""
        offset = getattr(leaf, "offset", None)
        return None if offset is None else int(offset)

    def nbytes(self, leaf: Any) -> int:
        """Return the bytes of the cache, spare rows included."""
        return 0 if leaf.empty() else int(leaf.nbytes)

    # ------------------------------------------------------------ rows

    def rows(self, leaf: Any) -> tuple[LayerRows | None, ...]:
        """Return each row group with its spare rows; None for a group without rows.

        The number of groups never changes. A group of two arrays may be packed as K and V are, so
        arrays that must stay exact have groups of their own.
        """
        return ()

    def rates(self, leaf: Any) -> tuple[int, ...]:
        """Return the tokens per row of each row group, read from a probed cache."""
        return (1,) * len(self.rows(leaf))

    def put_rows(self, leaf: Any, groups: Sequence[LayerRows | None], position: int) -> None:
        """Make the row groups of the first `position` tokens the rows of the cache."""

    def trim(self, leaf: Any, groups: Sequence[LayerRows | None], position: int) -> None:
        """Forget all after `position`; `groups` are views of the rows before. A state follows."""
        self.put_rows(leaf, groups, position)

    # ------------------------------------------------------------ windows

    def window_size(self, leaf: Any) -> int:
        """Return how many tokens the window looks back; 0 for no window."""
        return 0

    def window_held(self, leaf: Any) -> int:
        """Return how many of the last tokens certainly have rows in the window."""
        return 0

    def window(self, leaf: Any) -> LayerRows:
        """Return the window's rows, oldest first."""
        raise NotImplementedError

    def put_window(self, leaf: Any, arrays: Sequence[mx.array], position: int) -> None:
        """Make `arrays` the window; their last row is the token before `position`."""
        raise NotImplementedError

    # ------------------------------------------------------------ states

    def state(self, leaf: Any) -> StateArrays:
        """Return the state's arrays, without a copy; None for an array that does not exist yet.

        The number of arrays never changes: a cache with an empty tuple has no state.
        """
        return ()

    def put_state(self, leaf: Any, arrays: StateArrays, position: int) -> None:
        """Make `arrays` the state at `position`; copy those that the layer writes in place."""

    # ------------------------------------------------------------ taking a forward back

    def cut(self, leaf: Any, rows: int) -> None:
        """Remove the last `rows` of a forward that had more rows, if the kind `cuts`."""
        raise NotImplementedError

    def checkpoint(self, leaf: Any) -> Any:
        """Return what `back` needs to take the next forward back, if the kind `rewinds`."""
        return None

    def back(self, leaf: Any, saved: Any, rows: int) -> None:
        """Take back the forward of `rows` tokens that followed the checkpoint `saved`."""
