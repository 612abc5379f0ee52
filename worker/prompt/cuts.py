"""Where a prefill is cut. A pure function of the tokens, so that every run cuts alike.

How a prompt is cut into forwards changes the last bits of its KV (facts/mlx.md 2), so cold, warm,
cached and uncached requests all ask here. The cache keeps and resumes KV at these cuts only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

HEADER_GAP_TOKENS_MIN = 64  # a message header closer to the last cut is not worth a forward
TAIL_TOKENS_MAX = 16  # a generation prompt up to this long is fed with the last token


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """How this model's template marks messages, in token ids. Empty where it marks nothing."""

    header_ids: frozenset[int]  # a token of this set begins a message's header
    assistant_headers: tuple[tuple[int, ...], ...]  # how those of the model's own turns begin


@dataclass(frozen=True, slots=True)
class CutRule:
    """Cuts at multiples of the chunk, the end of system and tools, and message headers."""

    chunk: int  # tokens
    marks: TurnMarks

    def cuts(self, ids: Sequence[int]) -> list[int]:
        """Return the ends of the forwards before the last one, ascending.

        The last forward, whose logits begin the answer, reads what is behind the last cut: the
        generation prompt, or one token where the prompt does not end in one.
        """
        assert len(ids) > 0
        cuts = self.natural(ids)
        last = cuts[-1] if cuts else 0
        if len(ids) - last > TAIL_TOKENS_MAX:
            cuts.append(len(ids) - 1)
        return cuts

    def natural(self, ids: Sequence[int]) -> list[int]:
        """Return the cuts, all before the end, of every prompt that begins with `ids`.

        A header that `ids` breaks off in the midst of may be cut otherwise in a longer prompt.
        """
        cuts: list[int] = []
        last = 0
        always, maybe = self._candidates(ids)
        for position in sorted(always | maybe):
            if position in always or position - last >= HEADER_GAP_TOKENS_MIN:
                cuts.append(position)
                last = position
        return cuts

    def _candidates(self, ids: Sequence[int]) -> tuple[set[int], set[int]]:
        """Return what is cut wherever the last cut was, and what only far enough from it."""
        always = set(range(self.chunk, len(ids), self.chunk))
        maybe = set()
        for number, start in enumerate(self._header_positions(ids)):
            # The second message begins where system and tools end; what a model's own turn is
            # an answer to ends where its header begins, whatever follows (thinking or none).
            if number == 1 or self._is_assistants(ids, start):
                always.add(start)
            else:
                maybe.add(start)
        always.discard(0)
        return always, maybe - {0}

    def _header_positions(self, ids: Sequence[int]) -> list[int]:
        if not self.marks.header_ids:
            return []
        found = np.isin(np.asarray(ids), list(self.marks.header_ids))
        positions: list[int] = np.flatnonzero(found).tolist()
        return positions

    def _is_assistants(self, ids: Sequence[int], start: int) -> bool:
        headers = self.marks.assistant_headers
        return any(tuple(ids[start : start + len(header)]) == header for header in headers)
