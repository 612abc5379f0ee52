"""Keeps responses for a while, so that a client can continue a response by its id.

A response expires after AGE_S_MAX (OpenAI keeps it for 30 days). If there are too many responses,
the oldest ones of the API key with most responses are dropped. A response belongs to the API key
that asked for it, and no other key finds it. It is kept as JSON with its whole conversation, so it
does not depend on earlier responses. Images stay as the client sent them: an http(s) image is kept
as its url and fetched again.

A cloud model's response is kept with the id of its deployment. Opaque items stay unchanged, as only
the maker can read them.

Responses are kept in memory, and also in a journal if there is a directory for it, so that they
survive a restart. The journal has prompts and answers (shared/durable_journal.py says how they are
kept private) but no API keys. Expired responses leave the file at its next rewrite. A deletion
causes a rewrite.
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
SCHEMA: Final = 1  # version of the journal's records
PAGE_MAX: Final = 100  # input items in one page
_PAGE: Final = 20
_PREFIX: Final = "resp_"
ID_CHARS_MAX: Final = 1_024  # longest id of a cloud model's response
OUTPUT_MAX: Final = 1_000  # most output items of a cloud model's response
_SEALED: Final = ("reasoning", "compaction")  # item types that only their maker can read
_PREVIOUS: Final = "previous_response_id"


@dataclass(frozen=True, slots=True)
class _StoredResponse:
    """A response with the conversation up to it."""

    kept_at: float  # wall clock, in seconds
    items: bytes  # JSON of all input items of the conversation
    response: bytes  # JSON of the response
    maker: str = ""  # id of the cloud deployment that made the response; "" = local

    @property
    def nbytes(self) -> int:
        return len(self.items) + len(self.response)

    @property
    def conversation(self) -> list[Any]:
        """Return the input items of the conversation and the output items of the response."""
        return [*orjson.loads(self.items), *self.output]

    @property
    def output(self) -> list[dict[str, Any]]:
        output_items: list[dict[str, Any]] = orjson.loads(self.response)["output"]
        return output_items

    @property
    def cloud_ids(self) -> list[str]:
        """Return the ids of the output items that a cloud model made."""
        items = self.output if self.maker else []
        return [item["id"] for item in items if type(item.get("id")) is str]


@dataclass(frozen=True, slots=True)
class CloudInput:
    """A Responses body in two forms: for the cloud model, and for keeping with its response."""

    body: dict[str, Any]
    whole: dict[str, Any] | None  # None = only the provider knows the earlier conversation


_EntryKey = tuple[str, str]  # owner (the API key's name in the journal), response id
_Change = tuple[_EntryKey, _StoredResponse | None]  # None = a deletion


class ResponseStore:
    """Keeps responses by their id and the API key that asked for them.

    Invariants: `nbytes` is the sum over the entries and at most BYTES_MAX; there are at most
    COUNT_MAX entries; `_cloud_items` has each output item of a kept cloud response.
    Owner: the event loop. No method but `close` blocks. The journal's thread calls `everything`,
    `record` and `lost`.
    """

    def __init__(
        self, clock: Callable[[], float] = time.time, directory: Path | None = None
    ) -> None:
        """Load the responses in `directory`; with None nothing survives a restart."""
        self._clock = clock
        # Kept for one key: stored responses, 64 MB, and their journal
        self._entries: dict[_EntryKey, _StoredResponse] = {}  # oldest first
        self._cloud_items: dict[_EntryKey, str] = {}  # (owner, item id) -> response id
        self.nbytes = 0
        self.journal = open_journal_writer(directory, self, SCHEMA)
        self._restore()

    def __len__(self) -> int:
        return len(self._entries)

    def expand(self, api_key: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return `body` with its references replaced by the items that they refer to.

        Instructions of an earlier response are not carried over, as in the official API.

        Raises:
            RequestError: a response or an item is not kept, or the input is malformed.
        """
        previous = fields.text(body, _PREVIOUS)
        if not previous and not _has_references(body.get("input")):
            return body
        earlier_items = self._find(api_key, previous, _PREVIOUS).conversation if previous else []
        return body | {"input": earlier_items + self._items(api_key, body)}

    def maker(self, api_key: str, body: dict[str, Any]) -> str:
        """Return the deployment that made the response that `body` continues; "" if unknown."""
        previous = fields.text(body, _PREVIOUS)
        entry = self._kept(self._entry_key(api_key, previous)) if previous else None
        return entry.maker if entry is not None else response_maker(previous or "")

    def for_cloud(self, api_key: str, body: dict[str, Any], deployment: str) -> CloudInput:
        """Return `body`, with Hearth's fields, for the cloud model `deployment` and for keeping.

        Items that are kept here replace references, even if the provider could find the items by
        id: some providers keep no responses, and LiteLLM then ignores the id. All API keys share
        the provider's account, so with several keys an id passes only if this key received it.

        Raises:
            RequestError: 404: a response or an item is not kept here, and its id may not pass.
        """
        previous = fields.text(body, _PREVIOUS)
        entry = self._kept(self._entry_key(api_key, previous)) if previous else None
        if previous and entry is None and (api_key or not response_maker(previous)):
            _missing(f"Response {previous!r:.80}", _PREVIOUS)
        new_items = self._items(api_key, body, lets_pass=not api_key)
        earlier_items = entry.conversation if entry is not None else []
        is_whole = (entry is not None or not previous) and not _has_references(new_items)
        whole = body | {"input": earlier_items + new_items} if is_whole else None
        if entry is not None:
            body = {name: value for name, value in body.items() if name != _PREVIOUS}
            if entry.maker not in (
                "",
                deployment,
            ):  # only the maker knows its ids and encrypted items
                earlier_items = [_for_other_model(item) for item in earlier_items]
        sent_items = [item for item in earlier_items + new_items if item is not None]
        if api_key:
            sent_items = [
                allowed
                for item in sent_items
                if (allowed := self._without_foreign_id(api_key, item)) is not None
            ]
        return CloudInput(body | {"input": sent_items}, whole)

    def keep(
        self, api_key: str, body: dict[str, Any], response: dict[str, Any], maker: str = ""
    ) -> None:
        """Keep the `response` to the expanded `body`, unless the client forbids it.

        `maker` is the id of the cloud deployment that made the response. A malformed response of a
        deployment is not kept.
        """
        entry = self.entry_for(body, response, maker)
        if entry is not None:
            self.add(api_key, response, entry)

    def entry_for(
        self, body: dict[str, Any], response: dict[str, Any], maker: str
    ) -> _StoredResponse | None:
        """Return the entry that `keep` adds, or None. Any thread, as encoding it may take long."""
        if body.get("store") is False or (maker and not _is_response(response)):
            return None
        items, response_json = kept_json(input_items(body)), kept_json(response)
        entry = _StoredResponse(self._clock(), items, response_json, maker)
        return entry if entry.nbytes <= BYTES_MAX else None

    def add(self, api_key: str, response: dict[str, Any], entry: _StoredResponse) -> None:
        """Keep `entry`, which `entry_for` returned for `response`."""
        entry_key = self._entry_key(api_key, response["id"])
        self._add(entry_key, entry)
        self.journal.put((entry_key, entry), entry.nbytes)

    def response(self, api_key: str, response_id: str) -> dict[str, Any]:
        """Return the response object. Raises: RequestError: 404."""
        response: dict[str, Any] = orjson.loads(self._find(api_key, response_id).response)
        return response

    def delete(self, api_key: str, response_id: str) -> dict[str, Any]:
        """Delete a response, and return the body that confirms it.

        Raises: RequestError: 404.
        """
        self._find(api_key, response_id)
        entry_key = self._entry_key(api_key, response_id)
        self._drop(entry_key)
        self.journal.put((entry_key, None), 0, renews=True)
        return {"id": response_id, "object": "response", "deleted": True}

    def items(self, api_key: str, response_id: str, query: dict[str, str]) -> dict[str, Any]:
        """Return a page of the input items of a response, by default the newest item first.

        Raises:
            RequestError: 404, or an invalid `query` (order, limit, after).
        """
        items = orjson.loads(self._find(api_key, response_id).items)
        suffix = response_id.removeprefix(_PREFIX)
        rows = [  # an item without an id gets an id made from its index
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
        """Write the waiting records, at most for the journal writer's CLOSE_WAIT_S_MAX. Blocks."""
        self.journal.close()

    # ---------------------------------------------------------------- the journal

    def everything(self) -> Iterable[_Change]:
        """Return all entries. The journal's thread."""
        return list(self._entries.items())  # atomic: one C call, without Python code in it

    def record(self, change: _Change) -> list[Any]:
        """Return the journal record of a change. The journal's thread."""
        (owner, response_id), entry = change
        if entry is None:
            return [owner, response_id]
        makers = [entry.maker] if entry.maker else []
        return [owner, response_id, entry.kept_at, entry.items, entry.response, *makers]

    def lost(self) -> None:
        """Do nothing: no record depends on an earlier record."""

    def _restore(self) -> None:
        for _, record in self.journal.read():
            try:
                owner, response_id, *rest = record
                entry = _StoredResponse(*rest) if rest else None
            except (TypeError, ValueError):
                continue  # not a record of this store
            entry_key = (owner, response_id)
            if entry is not None and self._clock() - entry.kept_at <= AGE_S_MAX:
                self._add(entry_key, entry)
            elif entry_key in self._entries:
                self._drop(entry_key)

    # ---------------------------------------------------------------- entries

    def _entry_key(self, api_key: str, response_id: str) -> _EntryKey:
        return self.journal.named(api_key), response_id

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

    def _find(self, api_key: str, response_id: str, param: str | None = None) -> _StoredResponse:
        return self._kept(self._entry_key(api_key, response_id)) or _missing(
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

    def _items(self, api_key: str, body: dict[str, Any], *, lets_pass: bool = False) -> list[Any]:
        """Return the input items of `body`, with the referred item in place of each reference.

        With `lets_pass`, a reference stays if its item is not kept and its id is not Hearth's.
        """
        items = input_items(body) if body.get("input") is not None else []
        known: dict[str, dict[str, Any]] = {}  # response id -> its output items by their ids
        expanded_items = []
        for index, item in enumerate(items):
            if _is_reference(item):
                item_id = fields.required_text(item, "id", f"input[{index}].id")
                found = self._referred(api_key, item_id, known)
                if found is None and (not lets_pass or is_our_item_id(item_id)):
                    _missing(f"Item {item_id!r:.80}", f"input[{index}].id")
                item = found or item
            expanded_items.append(item)
        return expanded_items

    def _referred(
        self, api_key: str, wanted: str, known: dict[str, dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Return the output item `wanted`; the output of its response is added to `known`."""
        response_id = self._cloud_items.get((self.journal.named(api_key), wanted))
        if response_id is None:
            # Hearth's item ids are: type, request id, and index, joined by "_".
            parts = wanted.split("_")
            response_id = _PREFIX + "_".join(parts[1:-1]) if len(parts) >= 3 else ""
        if response_id not in known:
            is_kept = self._kept(self._entry_key(api_key, response_id)) is not None
            outputs = self.response(api_key, response_id)["output"] if is_kept else []
            known[response_id] = {output["id"]: output for output in outputs if "id" in output}
        found: dict[str, Any] | None = known[response_id].get(wanted)
        return found

    def _without_foreign_id(self, api_key: str, item: Any) -> Any:
        """Return `item`, without its id if another API key may have received that id.

        The provider would look the id up among the items of all API keys. Reasoning that has
        nothing but an id is left out.
        """
        if type(item) is not dict or not _is_provider_id(item.get("id")):
            return item
        if (
            type(item["id"]) is str
            and (self.journal.named(api_key), item["id"]) in self._cloud_items
        ):
            return item
        return _for_other_model(item) if not item.get("encrypted_content") else _without_id(item)


def _has_references(items: Any) -> bool:
    return type(items) is list and any(_is_reference(item) for item in items)


def _is_reference(item: Any) -> bool:
    return type(item) is dict and item.get("type") == "item_reference"


def _is_provider_id(item_id: Any) -> bool:
    return item_id is not None and not is_our_item_id(item_id)


def _for_other_model(item: Any) -> Any:
    """Return `item` for a model other than its maker; None if only the maker can read it."""
    if type(item) is not dict or not _is_provider_id(item.get("id", "")):
        return item
    return None if item.get("type") in _SEALED else _without_id(item)


def _without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}


def _is_response(value: dict[str, Any]) -> bool:
    """Return whether a cloud model's `value` is a well-formed response that can be continued."""
    response_id, output = value.get("id"), value.get("output")
    return (
        type(response_id) is str
        and 0 < len(response_id) <= ID_CHARS_MAX
        and type(output) is list
        and len(output) <= OUTPUT_MAX
        and all(type(item) is dict for item in output)
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
