"""Records the running requests on disk, and recognises requests during which a worker died."""

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

STEPS: Final = 64  # answer tokens between two writes of a request's record

log = logging.getLogger(__name__)


class Suspects:
    """Records the running requests, and recognises requests during which a worker died.

    A suspect is a prompt or answer that was computed when a worker died.
    Any thread may call `find`, `report` and `clear`; the inference thread owns the rest.
    Invariant: the file names all requests for which anything is being computed.
    """

    def __init__(
        self,
        store: SuspectStore | None = None,
        socket_path: Path | None = None,
        cut_label: str = "",
    ) -> None:
        """Without a store there are no suspects. `cut_label` names the rule of prefill cuts.

        Suspects of one cut rule are unknown under another.
        """
        self._store = store
        self._cut_label = cut_label.encode()
        # Content of the file, by (request id, position in steps, whether the request runs alone).
        self._recorded: dict[tuple[str, int, bool], Suspect] = {}
        self._file: int | None = None
        self.refusals = 0
        self._lock = threading.Lock()  # guards `refusals`
        if socket_path is None:
            return
        path, flags = running_path(socket_path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            path.unlink(missing_ok=True)
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            log.warning("a request that ends this worker will not be known: %s", error)

    # ------------------------------------------------------------ suspects

    def find(self, root: PrefixHash, tokens: Tokens) -> tuple[Suspect, ...]:
        """Return a prompt's suspects: a worker died while reading or answering these tokens.

        Without suspects, this lists an empty directory. Otherwise it reads a file of some 300 bytes
        per suspect, and hashes the prompt once (0.5 ms for 100,000 tokens).

        Raises:
            RequestError: 400, `prompt_refused`: the prompt ended two workers.
        """
        known = self._known()
        lengths = sorted({s.length for s in known.values() if s.length <= len(tokens)})
        names = prefix_hashes(root, tokens, lengths)
        matches = [known.get(self._digest(name, "read")) for name in names]
        if lengths and lengths[-1] == len(tokens):
            matches.append(known.get(self._digest(names[-1], "answer")))
        suspects = tuple(suspect for suspect in matches if suspect is not None)
        for suspect in suspects:
            if suspect.is_refused:
                with self._lock:
                    self.refusals += 1
                raise suspect.error()
        return suspects

    def forbids_idle_prefill(self, query: PrefixQuery) -> bool:
        """Return whether a worker died while prefilling these tokens in idle time."""
        known = self._known()
        return bool(known) and any(self._digest(name, "idle") in known for name in query.names)

    def drop_answered(self, request: Request) -> None:
        """Drop the suspects that the end of `request` has proved harmless.

        A request for prefill alone proves nothing about an answer.
        """
        if self._store is not None:
            self._store.drop(
                suspect
                for suspect in request.suspicion.suspects
                if suspect.kind == "read" or request.prefill_only is None
            )

    def report(self, api_key: str = "") -> dict[str, Any]:
        """Return the counts for `/v1/cache`, and the suspects of one API key.

        `api_key` is the digest of that key; "" = all keys.
        """
        suspects = self._known().values()
        owner = self._owner(api_key)
        return {
            "suspects": sum(not suspect.is_refused for suspect in suspects),
            "refused": sum(suspect.is_refused for suspect in suspects),
            "refusals": self.refusals,
            "rows": [
                {
                    "tokens": suspect.length,
                    "amid": suspect.kind,
                    "deaths": suspect.deaths,
                    "how": suspect.how,
                    "refused": suspect.is_refused,
                    "until": int(suspect.expires_at),
                }
                for suspect in sorted(suspects, key=lambda suspect: -suspect.died_at)
                if owner in ("", suspect.owner)
            ],
        }

    def clear(self, api_key: str = "") -> None:
        """Drop the suspects of the API key with the digest `api_key`; "" = of all keys."""
        owner = self._owner(api_key)
        if self._store is not None:
            self._store.drop(
                suspect for suspect in self._known().values() if owner in ("", suspect.owner)
            )

    # ------------------------------------------------------------ running requests

    def record(self, running: Sequence[Request]) -> None:
        """Write exactly the running requests and their positions to the file.

        If a request or a position has changed, this costs a system call. Between two steps requests
        still count as running, because the device computes one token ahead.
        """
        is_sole = len(running) == 1
        keys = [
            (request.request_id, request.position + request.completion_tokens // STEPS, is_sole)
            for request in running
        ]
        if keys != [*self._recorded]:
            known, self._recorded = self._recorded, {}
            for key, request in zip(keys, running, strict=True):
                self._recorded[key] = known.get(key) or self._suspect(request, is_sole)
            self._write()

    def record_idle(self, query: PrefixQuery, number: int) -> None:
        """Record that `query` is prefilled in idle time up to the cut `number`."""
        length = query.cuts[number]
        name = self._digest(query.names[number], "idle")
        self._recorded = {("", 0, False): Suspect(name, "", "idle", length, length)}
        self._write()

    def _suspect(self, request: Request, is_sole: bool) -> Suspect:
        """Return the entry that becomes a suspect if the worker dies during `request`."""
        kind: SuspectKind = "answer"
        prefix, length = request.suspicion.prompt_name, request.prompt_tokens
        if not request.is_prefilled:
            number = request.next_cut()
            kind, prefix, length = "read", request.query.names[number], request.query.cuts[number]
        own = Suspect(
            self._digest(prefix, kind), self._owner(request.api_key), kind, length, length
        )
        suspects = request.suspicion.suspects
        longest = max((own, *suspects), key=lambda suspect: suspect.length)
        tokens = max(longest.length, request.position + request.completion_tokens)
        return replace(longest, tokens=tokens, is_alone=is_sole and bool(suspects))

    def _write(self) -> None:
        if self._file is not None:
            suspects = {request_id: s for (request_id, _, _), s in self._recorded.items()}
            with contextlib.suppress(OSError):  # if the disk is full, a death leaves no suspect
                os.pwrite(self._file, orjson.dumps(suspects) + b"\n", 0)

    def _known(self) -> Mapping[str, Suspect]:
        return self._store.all() if self._store is not None else {}

    def _owner(self, api_key: str) -> str:
        return self._digest(api_key.encode(), "owner") if api_key else ""

    def _digest(self, content: bytes, kind: str) -> str:
        """Return the store's name for `content`, a hash with the store's secret and `kind`."""
        secret = self._store.secret if self._store is not None else b""
        person = kind.encode()
        digest = blake2b(content, key=secret, digest_size=HASH_BYTES, person=person)
        digest.update(self._cut_label)
        return digest.hexdigest()
