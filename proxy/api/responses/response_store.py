"""Keeps responses for a while, so that a client can go on from one by its id.

They end after AGE_S_MAX (OpenAI keeps them for 30 days), and where there are too many the oldest of
the key that has most go first. Each is kept under the key of who asked for it, and is not there for
anyone else. What is kept is the whole conversation up to it, as JSON: a response outlives those
that it came after.
Images are part of it as the client sent them: an http(s) one is its url, and is fetched again.
What a cloud model made is kept with the name of its maker, opaque items as they came: they go back
to the maker, and nobody else can read them.
They are in memory, and in a journal on disk, where there is a directory for it, so that a restart
loses none. Prompts and answers stand there (shared/durable_journal.py says how they are kept
private), API keys never. What has expired goes when the file is next made anew; what was deleted
makes it so.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import orjson

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.api.responses.parse import input_items
from hearth.shared.durable_journal import open_journal_writer
from hearth.shared.errors import RequestError
from hearth.shared.kept_json import kept_json
from hearth.shared.memory_by_owner import first_of_largest
from hearth.shared.our_ids import is_our_item_id, response_maker

COUNT_MAX: Final = 1_000
BYTES_MAX: Final = 64 * 1024 * 1024
AGE_S_MAX: Final = 3_600.0
SCHEMA: Final = 1  # of the journal's records
PAGE_MAX: Final = 100  # input items in one answer
_PAGE: Final = 20
_PREFIX: Final = "resp_"
ID_CHARS_MAX: Final = 1_024  # of a response that a cloud model made
OUTPUT_MAX: Final = 1_000  # items of that
_SEALED: Final = ("reasoning", "compaction")  # only their maker reads them
_PREVIOUS: Final = "previous_response_id"


@dataclass(frozen=True, slots=True)
class _StoredResponse:
    """A response and the conversation up to it."""

    kept_at: float  # wall clock, in seconds
    items: bytes  # JSON of the input, those before it included
    response: bytes  # JSON of the response
    maker: str = ""  # the id of the cloud deployment that made it; "" = a model here

    @property
    def nbytes(self) -> int:
        return len(self.items) + len(self.response)

    @property
    def conversation(self) -> list[Any]:
        """All items up to the response and those of it."""
        return [*orjson.loads(self.items), *self.output]

    @property
    def output(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = orjson.loads(self.response)["output"]
        return found

    @property
    def cloud_ids(self) -> list[str]:
        """The ids of the output items that a cloud model made."""
        rows = self.output if self.maker else []
        return [row["id"] for row in rows if type(row.get("id")) is str]


@dataclass(frozen=True, slots=True)
class CloudInput:
    """A Responses body as a cloud model is sent it, and as it is kept with the response."""

    body: dict[str, Any]
    whole: dict[str, Any] | None  # None: the provider alone knows what came before


_EntryKey = tuple[str, str]  # what the key is known by, and the response's id
_Change = tuple[_EntryKey, _StoredResponse | None]  # None: it was deleted


class ResponseStore:
    """Responses by their id and the key of who asked. Owner: the event loop. Nothing blocks.

    Invariant: `nbytes` is the sum over entries, at most BYTES_MAX; at most COUNT_MAX entries; each
    output item of a cloud's is in `_cloud_items` while its response is kept.
    Only `everything`, `record` and `lost` are the journal's thread's.
    """

    def __init__(
        self, clock: Callable[[], float] = time.time, directory: Path | None = None
    ) -> None:
        """Take up what `directory` holds; None keeps nothing across restarts."""
        self._clock = clock
        # Kept for one key: stored responses, 64 MB, and their journal
        self._entries: dict[_EntryKey, _StoredResponse] = {}  # oldest first
        self._cloud_items: dict[_EntryKey, str] = {}  # owner, item's id -> its response's id
        self.nbytes = 0
        self.journal = open_journal_writer(directory, self, SCHEMA)
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
        if not previous and not _has_references(body.get("input")):
            return body
        before = self._find(key, previous, _PREVIOUS).conversation if previous else []
        return body | {"input": before + self._items(key, body)}

    def maker(self, key: str, body: dict[str, Any]) -> str:
        """Return the id of the deployment whose response `body` goes on from; "" of none known."""
        previous = fields.text(body, _PREVIOUS)
        entry = self._kept(self._entry_key(key, previous)) if previous else None
        return entry.maker if entry is not None else response_maker(previous or "")

    def for_cloud(self, key: str, body: dict[str, Any], deployment: str) -> CloudInput:
        """Return what the cloud model `deployment` is sent of `body`, ours still among it.

        What is kept here is put in, also where the provider would find it by its id: not each one
        keeps responses, and LiteLLM passes over an id then. All keys share the provider's account:
        where there are several, an id passes only if this key was given it.

        Raises:
            RequestError: 404; it refers to what is not kept here and may not be asked for there.
        """
        previous = fields.text(body, _PREVIOUS)
        entry = self._kept(self._entry_key(key, previous)) if previous else None
        if previous and entry is None and (key or not response_maker(previous)):
            _missing(f"Response {previous!r:.80}", _PREVIOUS)
        now = self._items(key, body, lets_pass=not key)
        before = entry.conversation if entry is not None else []
        is_whole = (entry is not None or not previous) and not _has_references(now)
        whole = body | {"input": before + now} if is_whole else None
        if entry is not None:
            body = {name: value for name, value in body.items() if name != _PREVIOUS}
            if entry.maker not in ("", deployment):  # who alone has what its ids and seals mean
                before = [_unsealed(item) for item in before]
        sent = [item for item in before + now if item is not None]
        if key:
            sent = [kept for item in sent if (kept := self._given_only(key, item)) is not None]
        return CloudInput(body | {"input": sent}, whole)

    def keep(
        self, key: str, body: dict[str, Any], response: dict[str, Any], maker: str = ""
    ) -> None:
        """Keep `response` to the expanded `body`, unless the client said that it is not to be.

        `maker` is the id of the cloud deployment that made it, which may have made anything.
        """
        entry = self.made(body, response, maker)
        if entry is not None:
            self.add(key, response, entry)

    def made(
        self, body: dict[str, Any], response: dict[str, Any], maker: str
    ) -> _StoredResponse | None:
        """Return what is to be kept, as of `keep`. Any thread: it is of any size."""
        if body.get("store") is False or (maker and not _is_response(response)):
            return None
        items, made = kept_json(input_items(body)), kept_json(response)
        entry = _StoredResponse(self._clock(), items, made, maker)
        return entry if entry.nbytes <= BYTES_MAX else None

    def add(self, key: str, response: dict[str, Any], entry: _StoredResponse) -> None:
        """Keep the `entry` made of `response`."""
        entry_key = self._entry_key(key, response["id"])
        self._add(entry_key, entry)
        self.journal.put((entry_key, entry), entry.nbytes)

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
        self.journal.put((entry_key, None), 0, renews=True)
        return {"id": response_id, "object": "response", "deleted": True}

    def items(self, key: str, response_id: str, query: dict[str, str]) -> dict[str, Any]:
        """Return a page of the input of a response, the newest item first.

        Raises:
            RequestError: 404, or a `query` (order, limit, after) that is not the API's.
        """
        items = orjson.loads(self._find(key, response_id).items)
        suffix = response_id.removeprefix(_PREFIX)
        rows = [  # those without an id under one made of their number
            {"type": "message", **item, "id": item.get("id") or f"in_{suffix}_{index}"}
            for index, item in enumerate(items)
        ]
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

    def close(self) -> None:
        """Write what waits, within CLOSE_WAIT_S_MAX of the journal writer. Once; blocks."""
        self.journal.close()

    # ---------------------------------------------------------------- the journal

    def everything(self) -> Iterable[_Change]:
        """Return all that is kept. The journal's thread."""
        return list(self._entries.items())  # at once: nothing of Python's runs within

    def record(self, item: _Change) -> list[Any]:
        """Return what is written of a change. The journal's thread."""
        (owner, response_id), entry = item
        if entry is None:
            return [owner, response_id]
        more = [entry.maker] if entry.maker else []
        return [owner, response_id, entry.kept_at, entry.items, entry.response, *more]

    def lost(self) -> None:
        """Nothing that is written refers to what was written before."""

    def _restore(self) -> None:
        for _, record in self.journal.read():
            try:
                owner, response_id, *rest = record
                entry = _StoredResponse(*rest) if rest else None
            except (TypeError, ValueError):
                continue  # none of ours
            entry_key = (owner, response_id)
            if entry is not None and self._clock() - entry.kept_at <= AGE_S_MAX:
                self._add(entry_key, entry)
            elif entry_key in self._entries:
                self._drop(entry_key)

    # ---------------------------------------------------------------- within

    def _entry_key(self, key: str, response_id: str) -> _EntryKey:
        return self.journal.named(key), response_id

    def _add(self, entry_key: _EntryKey, entry: _StoredResponse) -> None:
        if entry_key in self._entries:
            self._drop(entry_key)
        self._entries[entry_key] = entry
        self.nbytes += entry.nbytes
        owner, response_id = entry_key
        self._cloud_items |= {(owner, item_id): response_id for item_id in entry.cloud_ids}
        while (is_long := len(self._entries) > COUNT_MAX) or self.nbytes > BYTES_MAX:
            rows = self._entries.items()
            self._drop(first_of_largest((k[0], k, 1 if is_long else e.nbytes) for k, e in rows))

    def _find(self, key: str, response_id: str, param: str | None = None) -> _StoredResponse:
        return self._kept(self._entry_key(key, response_id)) or _missing(
            f"Response {response_id!r:.80}", param
        )

    def _kept(self, entry_key: _EntryKey) -> _StoredResponse | None:
        entry = self._entries.get(entry_key)
        if entry is not None and self._clock() - entry.kept_at > AGE_S_MAX:
            self._drop(entry_key)
            return None
        return entry

    def _drop(self, entry_key: _EntryKey) -> None:
        entry = self._entries.pop(entry_key)
        self.nbytes -= entry.nbytes
        owner, response_id = entry_key
        for item_id in entry.cloud_ids:
            if self._cloud_items.get((owner, item_id)) == response_id:
                del self._cloud_items[owner, item_id]

    def _items(self, key: str, body: dict[str, Any], *, lets_pass: bool = False) -> list[Any]:
        """Return the input items of `body` with those that they refer to.

        `lets_pass`: a reference to what is not kept here, and has no id of ours, stays.
        """
        given = input_items(body) if body.get("input") is not None else []
        known: dict[str, dict[str, Any]] = {}  # items by their ids, of each response once
        now = []
        for index, item in enumerate(given):
            if _is_reference(item):
                wanted = fields.required_text(item, "id", f"input[{index}].id")
                found = self._referred(key, wanted, known)
                if found is None and (not lets_pass or is_our_item_id(wanted)):
                    _missing(f"Item {wanted!r:.80}", f"input[{index}].id")
                item = found or item
            now.append(item)
        return now

    def _referred(
        self, key: str, wanted: str, known: dict[str, dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Return the output item `wanted`; responses that are read for it go to `known`."""
        response_id = self._cloud_items.get((self.journal.named(key), wanted))
        if response_id is None:
            # Of ours it is the kind, the id of the answer that it is part of, and its number there.
            parts = wanted.split("_")
            response_id = _PREFIX + "_".join(parts[1:-1]) if len(parts) >= 3 else ""
        if response_id not in known:
            is_kept = self._kept(self._entry_key(key, response_id)) is not None
            rows = self.response(key, response_id)["output"] if is_kept else []
            known[response_id] = {row["id"]: row for row in rows if "id" in row}
        found: dict[str, Any] | None = known[response_id].get(wanted)
        return found

    def _given_only(self, key: str, item: Any) -> Any:
        """Return `item`, without an id of a provider's that this key was not given.

        The provider would look among what all keys were given. Reasoning that is nothing but its
        id is left out.
        """
        if type(item) is not dict or not _is_elsewhere(item.get("id")):
            return item
        if type(item["id"]) is str and (self.journal.named(key), item["id"]) in self._cloud_items:
            return item
        return _unsealed(item) if not item.get("encrypted_content") else _without_id(item)


def _has_references(given: Any) -> bool:
    return type(given) is list and any(_is_reference(item) for item in given)


def _is_reference(item: Any) -> bool:
    return type(item) is dict and item.get("type") == "item_reference"


def _is_elsewhere(item_id: Any) -> bool:
    return item_id is not None and not is_our_item_id(item_id)


def _unsealed(item: Any) -> Any:
    """Return `item` for who did not make it; None of reasoning that only its maker reads."""
    if type(item) is not dict or not _is_elsewhere(item.get("id", "")):
        return item
    return None if item.get("type") in _SEALED else _without_id(item)


def _without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}


def _is_response(value: dict[str, Any]) -> bool:
    """Return whether what a cloud model sent is a response that can be gone on from."""
    response_id, output = value.get("id"), value.get("output")
    return (
        type(response_id) is str
        and 0 < len(response_id) <= ID_CHARS_MAX
        and type(output) is list
        and len(output) <= OUTPUT_MAX
        and all(type(row) is dict for row in output)
    )


def _missing(what: str, param: str | None) -> NoReturn:
    raise RequestError(
        f"{what} is not kept: this server forgets after {AGE_S_MAX / 60:g} minutes, the oldest "
        f"beyond {COUNT_MAX:,} or {BYTES_MAX // 2**20} MB of conversations, images included, and "
        "what was sent with store: false. Send the whole conversation in input.",
        status=404,
        code="previous_response_not_found" if param == _PREVIOUS else "not_found",
        param=param,
    )
