"""Remembers which prefixes this worker has kept, by the names that other machines give them too."""

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

from hearth.shared.kv_move_messages import HELD_NAMES_MAX, Holds
from hearth.worker.cache.block_hash import PrefixHash, prefix_hashes
from hearth.worker.cache.prefix_search import PrefixQuery

NOTED_MAX: Final = 256  # prompts between two looks, a second apart


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """A prefix by this machine's names: of the empty prefix that it begins with, and its own."""

    root: PrefixHash
    end: PrefixHash


class HeldPrefixes:
    """Where prompts that ended here may be gone on from, the last used HELD_NAMES_MAX.

    Told are the end of system and tools, and the last two cuts: the very last one may be none of
    a longer prompt. That is three names a turn at most, and each once.
    Any thread may call any method; none blocks long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: deque[PrefixQuery] = deque(maxlen=NOTED_MAX)
        self._by_name: OrderedDict[bytes, HeldPrefix] = OrderedDict()
        self._dropped: set[bytes] = set()  # not told yet

    def note(self, query: PrefixQuery) -> None:
        """Note a prompt that was read to its last cut."""
        if query.portable_root is not None and query.root is not None and query.cuts:
            self._noted.append(query)

    def changes(self) -> Holds:
        """Return what is to be told since this was asked last."""
        with self._lock:
            added: list[bytes] = []
            while self._noted:
                added += self._add(self._noted.popleft())
            while len(self._by_name) > HELD_NAMES_MAX:
                self._dropped.add(self._by_name.popitem(last=False)[0])
            told = Holds([n for n in added if n in self._by_name], list(self._dropped))
            self._dropped.clear()
            return told

    def _add(self, query: PrefixQuery) -> list[bytes]:
        assert query.root is not None and query.portable_root is not None
        local = dict(zip(query.cuts, query.names, strict=True))
        ends = sorted({*query.cuts[-2:], query.system_end} & local.keys())
        added: list[bytes] = []
        for end, name in zip(
            ends, prefix_hashes(query.portable_root, query.tokens, ends), strict=True
        ):
            if name not in self._by_name:
                added.append(name)
            self._by_name[name] = HeldPrefix(query.root, local[end])
            self._by_name.move_to_end(name)
            self._dropped.discard(name)
        return added

    def all(self) -> Holds:
        """Return what is to be told to one who knows nothing yet."""
        with self._lock:
            return Holds(list(self._by_name), [])

    def find(self, name: bytes) -> HeldPrefix | None:
        with self._lock:
            return self._by_name.get(name)

    def drop(self, name: bytes) -> None:
        """Its files are gone: nobody is to seek it here."""
        with self._lock:
            if self._by_name.pop(name, None) is not None:
                self._dropped.add(name)

    def clear(self) -> None:
        with self._lock:
            self._noted.clear()
            self._dropped.update(self._by_name)
            self._by_name.clear()
