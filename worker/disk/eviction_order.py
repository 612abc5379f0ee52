"""Decides in which order KV files are evicted. Computes with values and does no I/O.

The worth of a file is tokens to prefill again / bytes, and falls with the time since the last use.
The worth of a snapshot or a window, which serves a single prefix, also falls with the number of
tokens from that prefix to where the conversation ends or branches.
A snapshot saves all tokens since the snapshot before it, so a snapshot gains worth when its
neighbours go. Snapshots thus thin out evenly, and go before rows, which save many more tokens for
their bytes.
Eviction goes leaf by leaf: the files that follow an extent go before the extent's own files.
Files that no server of this version reads are worth nothing and go first.
Source: worker/cache/eviction.py, which ranks by conversations. A directory has only times.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.file_format import FileKind, FileName

# The chance that a conversation continues falls in proportion to 1 / t, with t the time since its
# last request; within one hour all conversations count alike.
AGE_UNIT_S: Final = 3600.0
# A resume this many tokens before a conversation's end is half as likely as at the end. At 256
# tokens it is a fifth as likely, as worker/cache/eviction.py assumes for the last turn but one.
DISTANCE_UNIT_TOKENS: Final = 64
REACH_TOKENS_MAX: Final = 16_384  # longest walk along a chain of files

RootedPrefix = tuple[str, PrefixHash]  # (root directory, name of the prefix): roots never meet


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file with the facts from its name and its directory entry."""

    root: str  # name of the file's directory
    name: FileName
    nbytes: int
    used_at: float  # seconds since the epoch
    is_read: bool = True  # whether a server of this version can read the file

    @property
    def start(self) -> RootedPrefix:
        return self.root, self.name.start

    @property
    def end(self) -> RootedPrefix:
        return self.root, self.name.end

    @property
    def needs(self) -> RootedPrefix:
        """The prefix that has to be restored before this file is of use."""
        return self.start if self.name.kind is FileKind.ROWS else self.end


def files_to_evict(files: Iterable[StoredFile], now: float) -> Iterator[StoredFile]:
    """Yield all files in the order of eviction. A yielded file counts as removed."""
    chains = _FileChains(files)
    order = itertools.count()
    heap = [(chains.worth(file, now), next(order), file) for file in chains.leaves()]
    heapq.heapify(heap)
    while heap:
        last_worth, _, file = heapq.heappop(heap)
        current = chains.worth(file, now)
        if current > last_worth:  # the file's worth grew when a neighbour was removed
            heapq.heappush(heap, (current, next(order), file))
            continue
        exposed = chains.remove(file)
        yield file
        for leaf in exposed:
            heapq.heappush(heap, (chains.worth(leaf, now), next(order), leaf))
    # Forged names may form a circle, in which no file is a leaf.
    yield from sorted(chains.files, key=lambda file: file.used_at)


class _FileChains:
    """The chains that files form: the files that end at a prefix, and the files that need it.

    Invariant: `_needed_by` and `_arrivals` hold exactly the files in `files`.
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
        """Remove a file; return the files that have become leaves."""
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
        """Return the tokens since the state before `state`, and the bytes of these tokens' rows.

        Without `state`, these tokens would be prefilled again, and the rows would be useless.
        If only the state's own bytes counted, the last state of an old conversation, and all rows
        before that state, would outlive the rows of a new conversation.
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
        """Return how many tokens follow `prefix` until the conversation ends or branches."""
        tokens = 0
        while tokens < REACH_TOKENS_MAX:
            leaving = [file for file in self._needed_by[prefix] if file.name.kind is FileKind.ROWS]
            if len(leaving) != 1:
                break
            tokens, prefix = tokens + leaving[0].name.token_count, leaving[0].end
        return tokens
