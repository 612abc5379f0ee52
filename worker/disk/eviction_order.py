"""Orders files by which should go first when there are too many. A rule over values, no I/O.

Worth is tokens to prefill again / bytes, less with the time since the last use and, where a file
serves one place only (a snapshot, a window), with how far that is from where a line ends or parts.
A snapshot stands for all tokens since the one before it: as its neighbours go it gains, so
snapshots thin out evenly and go before the rows that they cost many times over.
Leaf by leaf: what hangs from a run goes before it.
What no server of this version reads any more is worth nothing, and goes before all else.
Source: worker/cache/eviction.py, which weighs by lines; a directory knows only times.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.file_format import FileKind, FileName

# A conversation silent for t is needed again about as 1 / t; within an hour all are alike.
AGE_UNIT_S: Final = 3600.0
# Tokens before a line's end at which a resume is half as likely; at 256 it is a fifth, as RAM's
# eviction has it for the turn before (worker/cache/eviction.py).
DISTANCE_UNIT_TOKENS: Final = 64
REACH_TOKENS_MAX: Final = 16_384  # how far along a line is looked

RootedPrefix = tuple[str, PrefixHash]  # (root directory, name of the prefix): roots never meet


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file, as its directory shows it."""

    root: str  # its directory's name
    name: FileName
    nbytes: int
    used_at: float  # seconds since the epoch
    is_read: bool = True  # whether a server of this version could read it

    @property
    def start(self) -> RootedPrefix:
        return self.root, self.name.start

    @property
    def end(self) -> RootedPrefix:
        return self.root, self.name.end

    @property
    def needs(self) -> RootedPrefix:
        """The prefix without which it is of no use."""
        return self.start if self.name.kind is FileKind.ROWS else self.end


def files_to_evict(files: Iterable[StoredFile], now: float) -> Iterator[StoredFile]:
    """Yield all files, in the order in which they should go. Each counts as gone once yielded."""
    chains = _FileChains(files)
    order = itertools.count()
    heap = [(chains.worth(file, now), next(order), file) for file in chains.leaves()]
    heapq.heapify(heap)
    while heap:
        last_worth, _, file = heapq.heappop(heap)
        current = chains.worth(file, now)
        if current > last_worth:  # what it could be replaced by has gone meanwhile
            heapq.heappush(heap, (current, next(order), file))
            continue
        exposed = chains.remove(file)
        yield file
        for leaf in exposed:
            heapq.heappush(heap, (chains.worth(leaf, now), next(order), leaf))
    # Names that were made up may run in a circle, where nothing is a leaf.
    yield from sorted(chains.files, key=lambda file: file.used_at)


class _FileChains:
    """The chains that files form: which arrive at a prefix, and which need it.

    Invariant: `_needed_by` and `_arrivals` hold the files in `files`, and no others.
    """

    def __init__(self, files: Iterable[StoredFile]) -> None:
        self.files = dict.fromkeys(files)
        self._arrivals: defaultdict[RootedPrefix, list[StoredFile]] = defaultdict(list)
        self._needed_by: defaultdict[RootedPrefix, dict[StoredFile, None]] = defaultdict(dict)
        for file in self.files:
            self._needed_by[file.needs][file] = None
            if file.name.kind is FileKind.ROWS:
                self._arrivals[file.end].append(file)

    def leaves(self) -> Iterator[StoredFile]:
        for file in self.files:
            if file.name.kind is not FileKind.ROWS or not self._needed_by[file.end]:
                yield file

    def remove(self, file: StoredFile) -> list[StoredFile]:
        """Take a file out; return what is a leaf now and was none before."""
        assert file in self.files, file
        del self.files[file]
        if file.name.kind is FileKind.ROWS:
            self._arrivals[file.end].remove(file)
        needed_by = self._needed_by[file.needs]
        del needed_by[file]
        return [] if needed_by else list(self._arrivals[file.needs])

    def worth(self, file: StoredFile, now: float) -> float:
        if not file.is_read:
            return 0.0
        tokens, row_bytes = file.name.token_count, 0
        if file.name.kind is FileKind.STATE:
            tokens, row_bytes = self._since_last_state(file)
        worth = tokens / max(1, file.nbytes)
        if file.name.kind is not FileKind.ROWS:
            worth /= 1 + self._tokens_after(file.end) / DISTANCE_UNIT_TOKENS
        worth = min(worth, tokens / max(1, file.nbytes + row_bytes))
        age = max(0.0, now - file.used_at) / AGE_UNIT_S
        return worth / (1 + age)

    def _since_last_state(self, state: StoredFile) -> tuple[int, int]:
        """Return what a resume would do without if it had to do without a state.

        That is how many tokens would be read again, and how many bytes their rows take: these
        rows and the state are of use together alone. By its own bytes the last state of an old
        conversation would outlive the rows of a new one, and all rows before it with it.
        """
        tokens, row_bytes, prefix = 0, 0, state.end
        while tokens < REACH_TOKENS_MAX:
            arrival = next(iter(self._arrivals[prefix]), None)
            if arrival is None:
                tokens = max(tokens, state.name.token_count)
                break
            tokens += arrival.name.token_count
            row_bytes, prefix = row_bytes + arrival.nbytes, arrival.start
            if any(file.name.kind is FileKind.STATE for file in self._needed_by[prefix]):
                break
        return tokens, row_bytes

    def _tokens_after(self, prefix: RootedPrefix) -> int:
        """Return how many tokens follow until the line ends or parts."""
        tokens = 0
        while tokens < REACH_TOKENS_MAX:
            leaving = [f for f in self._needed_by[prefix] if f.name.kind is FileKind.ROWS]
            if len(leaving) != 1:
                break
            tokens, prefix = tokens + leaving[0].name.token_count, leaving[0].end
        return tokens
