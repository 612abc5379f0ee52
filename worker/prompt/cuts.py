"""Where a prefill is cut. A pure function of the tokens, so that every run cuts alike.

How a prompt is cut into forwards changes the last bits of its KV (facts/mlx.md 2), so cold, warm,
cached and uncached requests all ask here. Later rooms keep and resume KV at these cuts only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

HEADER_GAP_TOKENS_MIN = 64  # a message header closer to the last cut is not worth a forward


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """How this model's template marks messages, in token ids. Empty where it marks nothing."""

    header_ids: frozenset[int]  # a token of this set begins a message's header
    generation_prompts: tuple[tuple[int, ...], ...]  # assistant headers, longest first


@dataclass(frozen=True, slots=True)
class CutRule:
    """Cuts at multiples of the chunk, the end of system and tools, headers, assistant headers."""

    chunk: int  # tokens
    marks: TurnMarks

    def cuts(self, ids: Sequence[int]) -> list[int]:
        """Return the ends of the forwards before the last token, which is fed alone; ascending.

        The result for a prefix of `ids` agrees up to that prefix's last token, except that the
        prefix's own end is a cut.
        """
        assert len(ids) > 0
        end = len(ids) - 1
        cuts: list[int] = []
        last = 0
        for position, is_always in self._candidates(ids):
            if position > end:
                break
            if position > last and (is_always or position - last >= HEADER_GAP_TOKENS_MIN):
                cuts.append(position)
                last = position
        if end > last:
            cuts.append(end)
        return cuts

    def _candidates(self, ids: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Yield (position, is a cut wherever the last one was), ascending."""
        always = set(range(self.chunk, len(ids), self.chunk))
        maybe = set()
        for number, start in enumerate(self._header_positions(ids)):
            length = self._generation_prompt_length(ids, start)
            if length:  # one cut for an assistant's header: a second would cost each turn a forward
                always.add(start + length - 1)
            elif number == 1:  # the second message begins where system and tools end
                always.add(start)
            else:
                maybe.add(start)
        maybe -= always
        yield from sorted([(p, True) for p in always] + [(p, False) for p in maybe])

    def _header_positions(self, ids: Sequence[int]) -> list[int]:
        if not self.marks.header_ids:
            return []
        found = np.isin(np.asarray(ids), list(self.marks.header_ids))
        positions: list[int] = np.flatnonzero(found).tolist()
        return positions

    def _generation_prompt_length(self, ids: Sequence[int], start: int) -> int:
        for prompt in self.marks.generation_prompts:
            if tuple(ids[start : start + len(prompt)]) == prompt:
                return len(prompt)
        return 0
