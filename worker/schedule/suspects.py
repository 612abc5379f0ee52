"""Writes down whose prompts and answers are computed, and finds those that a worker died with."""

import contextlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import orjson

from hearth.shared.suspects import Suspect, SuspectKind, SuspectStore, running_path
from hearth.worker.cache.block_hash import HASH_BYTES, PrefixHash, Tokens, prefix_hashes
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.schedule.request_state import Request

STEPS: Final = 64  # tokens of an answer after which it is written anew how far it is

log = logging.getLogger(__name__)


class Suspects:
    """What one worker knows of suspects, and leaves for who survives it.

    Any thread: `among`, `report`, `clear`. Owner of the rest: the inference thread.
    Invariant: while anything is computed, the file names those it is computed for.
    """

    def __init__(
        self,
        store: SuspectStore | None = None,
        socket_path: Path | None = None,
        cut_label: str = "",
    ) -> None:
        """Without a store nobody is suspected. `cut_label` names the rule of forwards.

        What died under another rule is tried again.
        """
        self._store = store
        self._cut_label = cut_label.encode()
        # What the file names, by request id, by how far it was, and by whether it ran alone.
        self._rows: dict[tuple[str, int, bool], Suspect] = {}
        self._file: int | None = None
        self.refusals = 0
        self._lock = threading.Lock()  # of `refusals`
        if socket_path is None:
            return
        path, flags = running_path(socket_path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            path.unlink(missing_ok=True)
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            log.warning("a request that ends this worker will not be known: %s", error)

    # ------------------------------------------------------------ who is suspected

    def among(self, root: PrefixHash, tokens: Tokens) -> tuple[Suspect, ...]:
        """Return what a prompt is suspected of: a worker died with its beginning, or its answer.

        With nobody suspected it lists an empty directory. Else each suspect costs a file of some
        300 bytes, and all together one hash over the prompt: 0.5 ms for 100,000 tokens.

        Raises:
            RequestError: 400, `prompt_refused`: it ended two workers.
        """
        known = self._known()
        lengths = sorted({row.length for row in known.values() if row.length <= len(tokens)})
        names = prefix_hashes(root, tokens, lengths)
        found = [known.get(self._named(name, "read")) for name in names]
        if lengths and lengths[-1] == len(tokens):
            found.append(known.get(self._named(names[-1], "answer")))
        suspects = tuple(row for row in found if row is not None)
        for row in suspects:
            if row.is_refused:
                with self._lock:
                    self.refusals += 1
                raise row.error()
        return suspects

    def spoils(self, query: PrefixQuery) -> bool:
        """Whether a worker died with these tokens in idle time: they are not read there again."""
        known = self._known()
        return bool(known) and any(self._named(name, "idle") in known for name in query.names)

    def served(self, request: Request) -> None:
        """Take note that `request` was answered, or read where that was all."""
        if self._store is not None:
            self._store.drop(
                row
                for row in request.suspicion.suspects
                if row.kind == "read" or request.prefill_only is None
            )

    def report(self, key: str = "") -> dict[str, Any]:
        """Return for `/v1/cache` how many there are, and those of the key with this digest.

        "" = everyone's.
        """
        rows = self._known().values()
        owner = self._owner(key)
        return {
            "suspects": sum(not row.is_refused for row in rows),
            "refused": sum(row.is_refused for row in rows),
            "refusals": self.refusals,
            "rows": [
                {
                    "tokens": row.length,
                    "amid": row.kind,
                    "deaths": row.deaths,
                    "how": row.how,
                    "refused": row.is_refused,
                    "until": int(row.expires_at),
                }
                for row in sorted(rows, key=lambda row: -row.died_at)
                if owner in ("", row.owner)
            ],
        }

    def clear(self, key: str = "") -> None:
        """Drop what the API key with this digest is suspected of, "" = everyone."""
        owner = self._owner(key)
        if self._store is not None:
            self._store.drop(row for row in self._known().values() if owner in ("", row.owner))

    # ------------------------------------------------------------ who runs

    def note(self, running: Sequence[Request]) -> None:
        """Have the file name these alone, and how far each is. Costs a system call if that is new.

        A device is one token ahead of what answers were given: they run also between two steps.
        """
        is_sole = len(running) == 1
        keys = [
            (each.request_id, each.position + each.completion_tokens // STEPS, is_sole)
            for each in running
        ]
        if keys != [*self._rows]:
            known, self._rows = self._rows, {}
            for key, each in zip(keys, running, strict=True):
                self._rows[key] = known.get(key) or self._row(each, is_sole)
            self._write()

    def note_idle(self, query: PrefixQuery, number: int) -> None:
        """Have it name work of nobody's, which reads `query` to its cut `number`."""
        length = query.cuts[number]
        name = self._named(query.names[number], "idle")
        self._rows = {("", 0, False): Suspect(name, "", "idle", length, length)}
        self._write()

    def _row(self, request: Request, is_sole: bool) -> Suspect:
        """Return what is suspected if the worker dies now: what it died with, or more of it."""
        kind: SuspectKind = "answer"
        prefix, length = request.suspicion.prompt_name, request.prompt_tokens
        if not request.is_prefilled:
            number = request.next_cut()
            kind, prefix, length = "read", request.query.names[number], request.query.cuts[number]
        row = Suspect(self._named(prefix, kind), self._owner(request.api_key), kind, length, length)
        suspects = request.suspicion.suspects
        row = max((row, *suspects), key=lambda each: each.length)
        tokens = max(row.length, request.position + request.completion_tokens)
        return replace(row, tokens=tokens, is_alone=is_sole and bool(suspects))

    def _write(self) -> None:
        if self._file is not None:
            rows = {request_id: row for (request_id, _, _), row in self._rows.items()}
            with contextlib.suppress(OSError):  # the disk is full: this death will count for nobody
                os.pwrite(self._file, orjson.dumps(rows) + b"\n", 0)

    def _known(self) -> Mapping[str, Suspect]:
        return self._store.all() if self._store is not None else {}

    def _owner(self, key: str) -> str:
        return self._named(key.encode(), "owner") if key else ""

    def _named(self, what: bytes, kind: str) -> str:
        """Return what `what` is known by in the store alone, as a subject of this kind."""
        secret = self._store.secret if self._store is not None else b""
        person = kind.encode()
        digest = blake2b(what, key=secret, digest_size=HASH_BYTES, person=person)
        digest.update(self._cut_label)
        return digest.hexdigest()
