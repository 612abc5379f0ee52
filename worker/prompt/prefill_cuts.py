"""Decides where a prefill is cut, by tokens, model and chip only, and never by the load.

The cuts of a prompt change the last bits of its KV (.context/LESSONS.md). So all requests,
cold or warm, cached or uncached, use the cuts of this module. The cache keeps and resumes KV only
at these cuts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hearth.worker.cache.block_hash import Tokens, pack
from hearth.worker.cache.image_keys import has_images, image_borders, is_inside
from hearth.worker.cache.prefill_grid import FULL_TO, HEADER_GAP, STEP_MIN, PrefillGrid

# Names of these rules in `label`, by `TurnMarks.is_r3`. Changed rules need another name.
RULES = {False: "r2", True: "r3"}
# In tokens. With other tools, conversations diverge inside system and tools, far from a header.
SYSTEM_STEP_MAX = 1024
LAST_OF_SEVERAL = [False, False, True]  # which of three messages in a row are the model's own
TAIL_TOKENS_MAX = 16  # up to this length, a generation prompt is not cut off


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """The token ids with which a template marks messages; empty without marks. Immutable."""

    header_ids: frozenset[int]  # a token of this set begins a message's header
    assistant_headers: tuple[tuple[int, ...], ...]  # first tokens of the model's own headers
    is_r3: bool = False  # r2 lacks results' ends, and marks of templates that count tools


@dataclass(frozen=True, slots=True)
class CutRule:
    """Cuts at multiples of the chunk, the end of system and tools, message headers, and images.

    Takes a prompt's keys (worker/cache/image_keys.py). Immutable: any thread may use a rule.
    Invariants: cuts ascend and lie inside the prompt. No cut lies inside an image, and each image
    has a cut at its end. So a prefill is resumed before or after an image, and the last forward
    reads no image.
    """

    chunk: int  # tokens
    marks: TurnMarks
    gap: int = HEADER_GAP  # tokens
    step_min: int = STEP_MIN  # see `PrefillGrid`
    full_to: int = FULL_TO

    @property
    def label(self) -> str:
        """The rule's name in KV files. Under this rule, KV cut by another rule is not canonical."""
        return f"{RULES[self.marks.is_r3]}.{self.chunk}.{self.gap}.{self.step_min}.{self.full_to}"

    @property
    def grid(self) -> PrefillGrid:
        return PrefillGrid(self.chunk, self.step_min, self.full_to)

    def cuts(self, ids: Sequence[int] | Tokens) -> list[int]:
        """Return the ends of the forwards before the last forward, ascending.

        The last forward reads the tokens after the last cut, and its logits begin the answer. These
        tokens are the generation prompt, or one token if the prompt ends without one.
        """
        assert len(ids) > 0
        cuts, _ = self._found(ids)
        last = cuts[-1] if cuts else 0
        if len(ids) - last > TAIL_TOKENS_MAX:
            cuts.append(len(ids) - 1)
        assert not cuts or 0 < cuts[0] <= cuts[-1] < len(ids), (cuts[0], cuts[-1], len(ids))
        return cuts

    def natural(self, ids: Sequence[int] | Tokens) -> list[int]:
        """Return the cuts before the end of `ids` that every prompt with this beginning has.

        A header that is incomplete at the end may be cut differently in a longer prompt.
        """
        cuts, undecided = self._found(ids)
        return cuts if undecided in cuts else [cut for cut in cuts if cut < undecided]

    def system_end(self, ids: Sequence[int] | Tokens) -> int:
        """Return the cut at the end of system and tools; 0 if the prompt has no such position.

        Up to that cut, other conversations may have the same tokens.
        """
        starts = self._header_positions(pack(ids))
        return starts[1] if len(starts) > 1 else 0

    def _found(self, ids: Sequence[int] | Tokens) -> tuple[list[int], int]:
        """Return the cuts, and the header whose cut depends on the tokens after `ids`."""
        cuts: list[int] = []
        last = 0
        always, maybe, undecided = self._candidates(ids)
        for position in sorted(always | maybe):
            if position in always or position - last >= self.gap:
                cuts.append(position)
                last = position
        return cuts, undecided

    def _candidates(self, ids: Sequence[int] | Tokens) -> tuple[set[int], set[int], int]:
        """Return the certain cuts, and the positions that need some distance from the last cut.

        Also return the last header if that may become the last of several; else the end.
        """
        maybe = set()
        keys = pack(ids)
        starts = self._header_positions(keys)
        always = set(self.grid.points(len(ids)))
        if starts:  # inside system and tools, or in a prompt that may end inside
            system_end = starts[1] if len(starts) > 1 else len(ids)
            always.update(range(SYSTEM_STEP_MAX, system_end, SYSTEM_STEP_MAX))
        if has_images(keys):
            begins, ends = image_borders(keys)
            always = {cut for cut in always if not is_inside(keys, cut)} | set(ends)
            maybe.update(begins)
        headers = self.marks.assistant_headers
        is_own = [
            any(tuple(ids[start : start + len(header)]) == header for header in headers)
            for start in starts
        ]
        for number, start in enumerate(starts):
            # The second message begins where system and tools end. A question ends where the
            # header of its answer begins, with thinking or without. If several messages come
            # before an answer, the next request may lack the last of these messages.
            if number == 1 or is_own[number] or is_own[number - 1 : number + 2] == LAST_OF_SEVERAL:
                always.add(start)
            else:
                maybe.add(start)
        always.discard(0)
        is_open = is_own[-2:] == [False, False]
        return always, maybe - {0}, starts[-1] if is_open else len(ids)

    def _header_positions(self, keys: Tokens) -> list[int]:
        if not self.marks.header_ids:
            return []
        found = np.isin(keys, list(self.marks.header_ids))
        positions: list[int] = np.flatnonzero(found).tolist()
        return positions
