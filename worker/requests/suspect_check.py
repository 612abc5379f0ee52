"""Looks for a prompt's tokens among those that workers died with, before it is admitted."""

import logging
import threading
from typing import Any

from hearth.shared.suspects.suspect_store import SuspectStore, Suspicion
from hearth.worker.cache.block_hash import PrefixHash, Tokens, prefix_hashes
from hearth.worker.schedule.suspects.running_forwards import answer_name, owner_name

log = logging.getLogger(__name__)


class SuspectCheck:
    """Refuses prompts, and tells who is suspected. Any thread.

    With nobody suspected it lists an empty directory. Else each suspicion costs a file of some 400
    bytes, and all together one hash over the prompt: 0.5 ms for 100,000 tokens.
    """

    def __init__(self, store: SuspectStore | None = None) -> None:
        self._store = store
        self.refusals = 0
        self._lock = threading.Lock()  # of `refusals`

    def suspicions(self, root: PrefixHash, tokens: Tokens) -> tuple[Suspicion, ...]:
        """Return what a prompt is suspected of: a worker died with its beginning, or its answer.

        Raises:
            RequestError: 400, `prompt_refused`: it died twice.
        """
        known = self._store.all() if self._store is not None else {}
        if self._store is None or not known:
            return ()
        lengths = sorted({row.length for row in known.values() if row.length <= len(tokens)})
        found = []
        for length, name in zip(lengths, prefix_hashes(root, tokens, lengths), strict=True):
            found.append(known.get(self._store.named(name).hex()))
            if length == len(tokens):
                found.append(known.get(answer_name(self._store, name).hex()))
        suspicions = tuple(row for row in found if row is not None)
        for row in suspicions:
            if row.is_refused:
                with self._lock:
                    self.refusals += 1
                raise row.refusal()
        return suspicions

    def report(self, key: str = "") -> dict[str, Any]:
        """Return for `/v1/cache` how many there are, and those of the key with this digest.

        "" = everyone's.
        """
        known = self._store.all() if self._store is not None else {}
        rows = [row for row in known.values() if not key or row.owner == self._owner(key)]
        return {
            "suspects": sum(not row.is_refused for row in known.values()),
            "refused": sum(row.is_refused for row in known.values()),
            "refusals": self.refusals,
            "rows": [_told(row) for row in sorted(rows, key=lambda row: -row.died_at)],
        }

    def clear(self, key: str = "") -> None:
        """Drop what the API key with this digest is suspected of, "" = everyone."""
        if self._store is not None:
            dropped = self._store.clear(self._owner(key) if key else "")
            if dropped:
                log.info("suspicions dropped: %d", dropped)

    def _owner(self, key: str) -> str:
        assert self._store is not None, "there is somebody to be looked for"
        return owner_name(self._store, key).hex()


def _told(row: Suspicion) -> dict[str, Any]:
    return {
        "tokens": row.length,
        "amid": row.kind,
        "deaths": row.deaths,
        "how": row.how,
        "refused": row.is_refused,
        "until": int(row.until),
    }
