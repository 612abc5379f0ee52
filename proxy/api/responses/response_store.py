"""Keeps responses for a while, so that a client can go on from one by its id.

They end after AGE_S_MAX (OpenAI keeps them for 30 days), and the oldest go first where there are
too many. Each is kept under the key of who asked for it, and is not there for anyone else. What is
kept is the whole conversation up to it, as JSON: a response outlives those that it came after.
Images are part of it as the client sent them: an http(s) one is its url, and is fetched again.
They are in memory, and in a journal on disk, where there is a directory for it, so that a restart
loses none. Prompts and answers stand there (shared/durable_journal.py says how they are kept
private), API keys never. What has expired goes when the file is next made anew; what was deleted
makes it so.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import orjson

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.api.responses.responses_request import input_items
from hearth.shared.durable_journal import Adapter
from hearth.shared.durable_journal_writer import open_journal_writer
from hearth.shared.errors import RequestError
from hearth.shared.kept_json import kept_json

COUNT_MAX: Final = 1_000
BYTES_MAX: Final = 64 * 1024 * 1024
AGE_S_MAX: Final = 3_600.0
SCHEMA: Final = 1  # of the journal's records
ADAPTERS: Final[Mapping[int, Adapter]] = {}
PAGE_MAX: Final = 100  # input items in one answer
_PAGE: Final = 20
_PREFIX: Final = "resp_"
_PREVIOUS: Final = "previous_response_id"


@dataclass(frozen=True, slots=True)
class _StoredResponse:
    """A response and the conversation up to it."""

    kept_at: float  # wall clock, in seconds
    items: bytes  # JSON of the input, those before it included
    response: bytes  # JSON of the response

    @property
    def nbytes(self) -> int:
        return len(self.items) + len(self.response)


_EntryKey = tuple[str, str]  # what the key is known by, and the response's id
_Change = tuple[_EntryKey, _StoredResponse | None]  # None: it was deleted


class ResponseStore:
    """Responses by their id and the key of who asked. Owner: the event loop. Nothing blocks.

    Invariant: `nbytes` is the sum over entries, at most BYTES_MAX; at most COUNT_MAX entries.
    Only `everything`, `record` and `lost` are the journal's thread's.
    """

    def __init__(
        self, clock: Callable[[], float] = time.time, directory: Path | None = None
    ) -> None:
        """Take up what `directory` holds; None keeps nothing across restarts."""
        self._clock = clock
        self._entries: OrderedDict[_EntryKey, _StoredResponse] = OrderedDict()  # oldest first
        self._lock = threading.Lock()  # for changes of `_entries`, which the journal reads
        self.nbytes = 0
        self.odd = 0  # records that were none of ours
        self._journal = open_journal_writer(directory, self, SCHEMA, ADAPTERS)
        self._restore()

    def __len__(self) -> int:
        return len(self._entries)

    def expanded(self, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return `body` with what it refers to in its input, in the place of the reference.

        Instructions of an earlier response are not carried over, as in the official API.

        Raises:
            RequestError: what it refers to is not kept, or the input is not one.
        """
        previous = fields.text(body, _PREVIOUS)
        before: list[Any] = []
        if previous:
            entry = self._find(key, previous, _PREVIOUS)
            before = orjson.loads(entry.items) + orjson.loads(entry.response)["output"]
        elif not _has_references(body.get("input")):
            return body
        given = input_items(body) if body.get("input") is not None else []
        known: dict[str, dict[str, Any]] = {}  # items by their ids, of each response once
        now = []
        for index, item in enumerate(given):
            now.append(self._resolved(key, item, f"input[{index}]", known))
        return body | {"input": before + now}

    def keep(self, key: str, body: dict[str, Any], response: dict[str, Any]) -> None:
        """Keep `response` to the expanded `body`, unless the client said that it is not to be."""
        if body.get("store") is False:
            return
        entry = _StoredResponse(self._clock(), kept_json(input_items(body)), kept_json(response))
        if entry.nbytes > BYTES_MAX:
            return
        entry_key = self._entry_key(key, response["id"])
        self._add(entry_key, entry)
        self._journal.put((entry_key, entry), entry.nbytes)

    def response(self, key: str, response_id: str) -> dict[str, Any]:
        """Return the response object. Raises: RequestError: 404."""
        found: dict[str, Any] = orjson.loads(self._find(key, response_id).response)
        return found

    def delete(self, key: str, response_id: str) -> dict[str, Any]:
        """Forget a response, and return what its deletion is answered with.

        Raises: RequestError: 404.
        """
        self._find(key, response_id)
        entry_key = self._entry_key(key, response_id)
        self._drop(entry_key)
        self._journal.put((entry_key, None), 0, renews=True)
        return {"id": response_id, "object": "response", "deleted": True}

    def items(self, key: str, response_id: str, query: dict[str, str]) -> dict[str, Any]:
        """Return a page of the input of a response, the newest item first.

        Raises:
            RequestError: 404, or a `query` (order, limit, after) that is not the API's.
        """
        rows = _with_ids(orjson.loads(self._find(key, response_id).items), response_id)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            fields.refuse("order", order, "asc or desc")
        limit = query.get("limit", str(_PAGE))
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= PAGE_MAX):
            fields.refuse("limit", limit, f"a whole number from 1 to {PAGE_MAX}")
        if order == "desc":
            rows.reverse()
        if after := query.get("after"):
            ids = [row["id"] for row in rows]
            if after not in ids:
                fields.refuse("after", after, "the id of one of the items")
            rows = rows[ids.index(after) + 1 :]
        page = rows[: int(limit)]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(rows),
        }

    def flush(self, seconds: float) -> bool:
        """Wait at most `seconds` until the journal has it all; say whether it does. Blocks."""
        return self._journal.flush(seconds)

    def close(self) -> None:
        """Write what waits, within CLOSE_WAIT_S_MAX of the journal writer. Once; blocks."""
        self._journal.close()

    def report(self) -> dict[str, int]:
        """Return the journal's counters."""
        return {"odd": self.odd, **self._journal.report()}

    # ---------------------------------------------------------------- the journal

    def everything(self) -> Iterable[_Change]:
        """Return all that is kept. The journal's thread."""
        with self._lock:
            return list(self._entries.items())

    def record(self, item: _Change) -> list[Any]:
        """Return what is written of a change. The journal's thread."""
        (owner, response_id), entry = item
        if entry is None:
            return [owner, response_id]
        return [owner, response_id, entry.kept_at, entry.items, entry.response]

    def lost(self) -> None:
        """Nothing that is written refers to what was written before."""

    def _restore(self) -> None:
        now = self._clock()
        for _, record in self._journal.read():
            try:
                owner, response_id, *rest = record
                entry = _StoredResponse(*rest) if rest else None
            except (TypeError, ValueError):
                self.odd += 1
                continue
            entry_key = (owner, response_id)
            if entry is not None and now - entry.kept_at <= AGE_S_MAX:
                self._add(entry_key, entry)
            elif entry_key in self._entries:
                self._drop(entry_key)

    # ---------------------------------------------------------------- within

    def _entry_key(self, key: str, response_id: str) -> _EntryKey:
        return self._journal.named(key), response_id

    def _add(self, entry_key: _EntryKey, entry: _StoredResponse) -> None:
        if entry_key in self._entries:
            self._drop(entry_key)
        with self._lock:
            self._entries[entry_key] = entry
        self.nbytes += entry.nbytes
        while len(self._entries) > COUNT_MAX or self.nbytes > BYTES_MAX:
            self._drop(next(iter(self._entries)))

    def _find(self, key: str, response_id: str, param: str | None = None) -> _StoredResponse:
        entry_key = self._entry_key(key, response_id)
        entry = self._entries.get(entry_key)
        if entry is not None and self._clock() - entry.kept_at > AGE_S_MAX:
            self._drop(entry_key)
            entry = None
        return entry or _missing(f"Response {response_id!r:.80}", param)

    def _drop(self, entry_key: _EntryKey) -> None:
        with self._lock:
            self.nbytes -= self._entries.pop(entry_key).nbytes

    def _resolved(self, key: str, item: Any, param: str, known: dict[str, dict[str, Any]]) -> Any:
        """Return `item`, or the one that it refers to; responses read for it go to `known`."""
        if not _is_reference(item):
            return item
        wanted = fields.required_text(item, "id", f"{param}.id")
        # An item's id is its kind, the id of the answer that it is part of, and its number there.
        parts = wanted.split("_")
        response_id = _PREFIX + "_".join(parts[1:-1])
        if len(parts) >= 3 and self._entry_key(key, response_id) in self._entries:
            if response_id not in known:
                output = self.response(key, response_id)["output"]
                known[response_id] = {row["id"]: row for row in output}
            if wanted in known[response_id]:
                return known[response_id][wanted]
        _missing(f"Item {wanted!r:.80}", f"{param}.id")


def _has_references(given: Any) -> bool:
    return type(given) is list and any(_is_reference(item) for item in given)


def _is_reference(item: Any) -> bool:
    return type(item) is dict and item.get("type") == "item_reference"


def _missing(what: str, param: str | None) -> NoReturn:
    raise RequestError(
        f"{what} is not kept: this server forgets after {AGE_S_MAX / 60:g} minutes, the oldest "
        f"beyond {COUNT_MAX:,} or {BYTES_MAX // 2**20} MB of conversations, images included, and "
        "what was sent with store: false. Send the whole conversation in input.",
        status=404,
        code="previous_response_not_found" if param == _PREVIOUS else "not_found",
        param=param,
    )


def _with_ids(items: list[Any], response_id: str) -> list[dict[str, Any]]:
    """Return the items, those without an id under one made of their number."""
    suffix = response_id.removeprefix(_PREFIX)
    return [
        {"type": "message", **item, "id": item.get("id") or f"in_{suffix}_{index}"}
        for index, item in enumerate(items)
    ]
