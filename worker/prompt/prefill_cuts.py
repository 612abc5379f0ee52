"""Decides where a prefill is cut: a pure function of tokens, model and chip, never of the load.

The cuts of a prompt change the last bits of its KV (.context/LESSONS.md). So cold and warm, cached
and uncached requests all take their cuts from here. The cache keeps and resumes KV only at these
cuts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hearth.worker.cache.block_hash import Tokens, pack
from hearth.worker.cache.image_keys import has_images, image_borders, is_inside
from hearth.worker.cache.prefill_grid import FULL_TO, HEADER_GAP, STEP_MIN, PrefillGrid

# Names of these rules in `label`, by `TurnMarks.is_r3`. Changed rules need another name.
RULES = {False: "r2", True: "r3"}
# Tokens. Conversations with other tools diverge inside system and tools, where no header stands.
SYSTEM_STEP_MAX = 1024
LAST_OF_SEVERAL = [False, False, True]  # whether three messages in a row are the model's own
TAIL_TOKENS_MAX = 16  # a generation prompt of up to this length is not cut off


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """The token ids with which a template marks messages; empty without marks. Immutable."""

    header_ids: frozenset[int]  # a token of this set begins a message's header
    assistant_headers: tuple[tuple[int, ...], ...]  # first tokens of the model's own headers
    is_r3: bool = False  # r2 lacks marks of templates that count tools, and results' ends


@dataclass(frozen=True, slots=True)
class CutRule:
    """Cuts at multiples of the chunk, the end of system and tools, message headers, and images.

    Takes a prompt's keys (worker/cache/image_keys.py). Immutable: any thread may use it.
    Invariants: cuts ascend and lie inside the prompt. No cut lies inside an image, and a cut always
    stands behind one. So a prefill is resumed before or behind an image, and the last forward shows
    none.
    """

    chunk: int  # tokens
    marks: TurnMarks
    gap: int = HEADER_GAP  # tokens
    step_min: int = STEP_MIN  # see `PrefillGrid`
    full_to: int = FULL_TO

    @property
    def label(self) -> str:
        """The rule's name in KV files: KV cut by another rule is not canonical here."""
        return f"{RULES[self.marks.is_r3]}.{self.chunk}.{self.gap}.{self.step_min}.{self.full_to}"

    @property
    def grid(self) -> PrefillGrid:
        return PrefillGrid(self.chunk, self.step_min, self.full_to)

    def cuts(self, ids: Sequence[int] | Tokens) -> list[int]:
        """Return the ends of the forwards before the last forward, ascending.

        The last forward, whose logits begin the answer, reads the tokens behind the last cut: the
        generation prompt, or one token if the prompt does not end in a generation prompt.
        """
        assert len(ids) > 0
        cuts, _ = self._found(ids)
        last = cuts[-1] if cuts else 0
        if len(ids) - last > TAIL_TOKENS_MAX:
            cuts.append(len(ids) - 1)
        assert not cuts or 0 < cuts[0] <= cuts[-1] < len(ids), (cuts[0], cuts[-1], len(ids))
        return cuts

    def natural(self, ids: Sequence[int] | Tokens) -> list[int]:
        """Return the cuts that every prompt beginning with `ids` has, all before the end of `ids`.

        A header that `ids` breaks off may be cut differently in a longer prompt.
        """
        cuts, undecided = self._found(ids)
        return cuts if undecided in cuts else [cut for cut in cuts if cut < undecided]

    def system_end(self, ids: Sequence[int] | Tokens) -> int:
        """Return the cut at the end of system and tools; 0 if the prompt has no such position.

        Other conversations may begin alike up to there.
        """
        starts = self._header_positions(pack(ids))
        return starts[1] if len(starts) > 1 else 0

    def _found(self, ids: Sequence[int] | Tokens) -> tuple[list[int], int]:
        """Return the cuts, and the header whose cut depends on the tokens behind `ids`."""
        cuts: list[int] = []
        last = 0
        always, maybe, undecided = self._candidates(ids)
        for position in sorted(always | maybe):
            if position in always or position - last >= self.gap:
                cuts.append(position)
                last = position
        return cuts, undecided

    def _candidates(self, ids: Sequence[int] | Tokens) -> tuple[set[int], set[int], int]:
        """Return the certain cuts, and the positions cut only far enough behind the last cut.

        Also return the last header if it may turn out to be the last of several; else the end.
        """
        maybe = set()
        keys = pack(ids)
        starts = self._header_positions(keys)
        always = set(self.grid.points(len(ids)))
        if starts:  # inside system and tools, or in a prompt that may be part of them
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
            # header of its answer begins, with thinking or without. Of several messages before
            # an answer, the next request may lack the last.
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
