"""Holds what another worker says and sends of its files against the prompt that needs them.

Plain functions. Nothing that comes from elsewhere is believed: names, sizes, places and tokens have
to be those that the prompt itself gives, and each file becomes one under this worker's own names.
What stays is trust in the numbers, as in the answers of any worker that holds our keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hearth.shared.kv_move_messages import MOVED_FILES_MAX, Found
from hearth.worker.cache.block_hash import PrefixHash, prefix_hashes
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.disk.file_format import Damaged, Record, decode
from hearth.worker.disk.file_names import FileKind, FileName, parse

HEADER_BYTES: Final = 256 * 1024  # beside the arrays: their names, and the tokens ...
TOKEN_BYTES: Final = 16  # ... at most so many for each


class UnusableMove(Exception):
    """What another worker says or sends is not to be used. `reason` is a word to count by."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """What a model's KV takes at most, in bytes."""

    row: int  # of one token, raw
    window_row: int
    state: int

    def file_max(self, name: FileName) -> int:
        """Return how large the file of a record may be."""
        tokens = name.token_count
        arrays = {
            FileKind.ROWS: tokens * self.row,
            FileKind.WINDOW: tokens * self.window_row,
            FileKind.STATE: self.state,
        }
        return arrays[name.kind] + tokens * TOKEN_BYTES + HEADER_BYTES


@dataclass(frozen=True, slots=True)
class MovedFile:
    """A file of another worker's, and what it is to be here."""

    number: int  # in its Found
    theirs: FileName
    mine: FileName
    position: int  # where its run starts
    nbytes: int

    @property
    def end(self) -> int:
        return self.position + self.theirs.token_count


@dataclass(frozen=True, slots=True)
class MoveRules:
    """By what this worker reuses KV."""

    root: PrefixHash  # what its files are named under
    cut_label: str
    is_exact: bool
    sizes: ModelBytes


def moved_files(
    found: Found, end: int, query: PrefixQuery, rules: MoveRules
) -> tuple[MovedFile, ...]:
    """Return the files of a Found that leads to the prompt's position `end`.

    They stay as canonical as they are where the holder's root is this worker's own: where chip,
    system, MLX and settings are the same. Else they are fast.

    Raises:
        UnusableMove: they are not files of this prompt, or of no use here.
    """
    names = [parse(text, rules.cut_label) for text in found.files]
    theirs = [name for name in names if name is not None]
    if not len(names) == len(theirs) == len(found.sizes) <= MOVED_FILES_MAX:
        raise UnusableMove("names")
    is_same = found.root == rules.root
    if rules.is_exact and not (is_same and all(name.is_canonical for name in theirs)):
        raise UnusableMove("exact")
    places = _places([name for name in theirs if name.kind is FileKind.ROWS], end, query, rules)
    files = []
    for number, (name, nbytes) in enumerate(zip(theirs, found.sizes, strict=True)):
        place = places.get((name.start, name.end))
        if place is None or place.token_count != name.token_count:
            raise UnusableMove("names")
        if not 0 < nbytes <= rules.sizes.file_max(name):
            raise UnusableMove("size")
        mine = replace(name, start=place.start, end=place.end)
        if not is_same:
            mine = replace(mine, is_canonical=False, rule="")
        elif mine != name:
            raise UnusableMove("names")
        files.append(MovedFile(number, name, mine, place.position, nbytes))
    return tuple(files)


@dataclass(frozen=True, slots=True)
class _Place:
    """A run of the prompt by this worker's own names."""

    position: int
    token_count: int
    start: PrefixHash
    end: PrefixHash


def _places(
    runs: Sequence[FileName], end: int, query: PrefixQuery, rules: MoveRules
) -> dict[tuple[PrefixHash, PrefixHash], _Place]:
    """Return where the runs, one behind the other, lie in the prompt up to `end`: by their names.

    Raises:
        UnusableMove: they do not lead from its beginning to `end`.
    """
    are_joined = all(one.end == other.start for one, other in pairwise(runs))
    ends = list(accumulate(run.token_count for run in runs))
    if not (runs and are_joined and ends[-1] == end):
        raise UnusableMove("path")
    root = query.root or rules.root
    joints = [(0, root), *zip(ends, prefix_hashes(root, query.tokens, ends), strict=True)]
    return {
        (run.start, run.end): _Place(position, run.token_count, start, mine)
        for run, ((position, start), (_, mine)) in zip(runs, pairwise(joints), strict=True)
    }


def record_of(
    file: MovedFile, content: NDArray[np.uint8], found: Found, query: PrefixQuery, root: PrefixHash
) -> Record:
    """Return what was sent as a record of this worker's, under its `root`.

    Raises:
        UnusableMove: it is damaged, or of other tokens than the prompt's.
    """
    try:
        record = decode(content, PrefixHash(found.root), file.theirs)
    except Damaged as damage:
        raise UnusableMove(f"damaged_{damage.reason}") from damage
    tokens = query.tokens[file.position : file.end]
    if record.position != file.position or not np.array_equal(record.tokens, tokens):
        raise UnusableMove("tokens")
    mine = file.mine
    return replace(
        record,
        root=root,
        start=mine.start,
        end=mine.end,
        tokens=tokens,
        is_canonical=mine.is_canonical,
        rule=mine.rule,
    )
