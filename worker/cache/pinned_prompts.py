"""Holds pins: prompts that clients asked never to evict, in at most half of the cache's budget."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hearth.shared.errors import RequestError
from hearth.worker.cache.extent_store import MB, Extent, ExtentStore, KVArrays, PrefixNode

log = logging.getLogger(__name__)

PINS_MAX: Final = 1_000
SHARE: Final = 2  # pins may hold 1 / 2 of the budget


@dataclass(frozen=True, slots=True)
class Pin:
    """One prompt's path from the root, with the windows and snapshots that it had when pinned."""

    api_key: str  # digest of the API key that owns the pin
    path: tuple[Extent, ...]
    windows: tuple[Extent, ...]  # extents with a pinned window
    snapshots: tuple[PrefixNode, ...]  # nodes with a pinned snapshot

    @classmethod
    def of(cls, api_key: str, path: Sequence[Extent]) -> "Pin":
        """Return a pin of a path and of the path's present windows and snapshots."""
        windows = tuple(extent for extent in path if extent.window is not None)
        snapshots = tuple(extent.end for extent in path if extent.end.snapshot is not None)
        return cls(api_key, tuple(path), windows, snapshots)

    @property
    def nbytes(self) -> int:
        return _total([self])[0]

    @property
    def tokens(self) -> int:
        return self.path[-1].end.position

    def parts(self) -> Iterator[KVArrays]:
        parts = [
            *(extent.body for extent in self.path),
            *(extent.window for extent in self.windows),
            *(node.snapshot for node in self.snapshots),
        ]
        return (part for part in parts if part is not None)

    def mark(self, count: int) -> None:
        """Add `count`, 1 or -1, to the pin counts of everything that this pin holds."""
        for extent in self.path:
            extent.pinned += count
            assert extent.pinned >= 0, extent
        for extent in self.windows:
            extent.window_pinned += count
            assert extent.window_pinned >= 0, extent
        for node in self.snapshots:
            node.snapshot_pinned += count
            assert node.snapshot_pinned >= 0, node


class Pins:
    """All pins, each under the id of the request that asked for it.

    The API keys share 1 / `SHARE` of the budget equally; no key can use or see another key's share.
    An API key that the settings do not name (LiteLLM's) is counted once it pins a prompt. All
    shares then shrink, and a key above its new share loses its oldest pins when other keys need
    the room.
    Invariant: all pins together fit into 1 / `SHARE` of the budget, so that the rest of the budget
    can always be freed.
    Owner: the inference thread.
    """

    def __init__(self, store: ExtentStore, api_keys: int = 1) -> None:
        """`api_keys` is the least number of API keys that share the room, with or without pins."""
        self._store = store
        self._budget = store.budget
        self._api_keys_min = api_keys
        # Kept for one key: pinned prompts
        self._pins: dict[str, Pin] = {}

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    @property
    def nbytes(self) -> int:
        """The bytes that all pins hold together."""
        return _total(self)[0]

    def check(
        self, pin_id: str, api_key: str, path: Sequence[Extent], nbytes: int, buffers: int
    ) -> None:
        """Refuse a path that would take too much; `nbytes` in `buffers` are still to be copied.

        Pins of API keys above their share are dropped if that makes room for the path.

        Raises:
            RequestError: 409; the key's pins would hold more than its share, or be too many.
        """
        shares = self.shares(api_key)
        new_pin = Pin("", tuple(path), tuple(path), tuple(extent.end for extent in path))
        others = [pin for name, pin in self._pins.items() if name != pin_id]
        own = [pin for pin in others if pin.api_key == api_key]
        if len(own) >= PINS_MAX // shares:
            raise _refusal(f"There are {len(own):,} pins, as many as there may be.")
        used, needed = _total(own), _total([*own, new_pin])
        bytes_max = self._budget.bytes_max // SHARE // shares
        if needed[0] + nbytes > bytes_max:
            raise _refusal(
                f"The prompt's KV takes {_mb(needed[0] - used[0] + nbytes)} more, and pins, which "
                f"hold {_mb(used[0])}, may hold {_mb(bytes_max)}: half of the cache"
                f"{', shared among its keys' if shares > 1 else ''}."
            )
        buffers_max = self._budget.buffers_max // SHARE // shares
        if needed[1] + buffers > buffers_max:
            raise _refusal(
                f"The prompt's KV takes {needed[1] - used[1] + buffers:,} buffers more, and pins, "
                f"which hold {used[1]:,}, may hold {buffers_max:,}."
            )
        while self.used_share([*others, new_pin], nbytes, buffers) > 1:
            others.remove(self._drop_oldest(api_key))

    def shares(self, api_key: str) -> int:
        """Return how many API keys share the room for pins, `api_key` included."""
        return max(self._api_keys_min, len({api_key, *(pin.api_key for pin in self)}))

    def used_share(self, pins: Sequence[Pin], nbytes: int = 0, buffers: int = 0) -> float:
        """Return which share of the room for pins `pins` and `nbytes` in `buffers` take.

        This is the largest of three shares: of the bytes, of the buffers and of the number of pins.
        """
        used = _total(pins)
        return max(
            (used[0] + nbytes) / max(1, self._budget.bytes_max // SHARE),
            (used[1] + buffers) / max(1, self._budget.buffers_max // SHARE),
            len(pins) / PINS_MAX,
        )

    def _drop_oldest(self, spared: str) -> Pin:
        """Drop and return the oldest pin of the API key with the largest share, except `spared`."""
        api_keys = {pin.api_key for pin in self} - {spared}
        largest = max(
            api_keys,
            key=lambda api_key: self.used_share([pin for pin in self if pin.api_key == api_key]),
        )
        pin_id, pin = next(item for item in self._pins.items() if item[1].api_key == largest)
        log.info("a pin is given up for another key's, which holds less than its share")
        self.drop(pin_id)
        return pin

    def add(self, pin_id: str, api_key: str, path: Sequence[Extent]) -> None:
        """Pin a path that `check` has accepted, with its present windows and snapshots.

        The new pin replaces an earlier pin with the same id.
        """
        assert path and path[0].start.arrival is None, "the path does not begin at a root"
        pin = Pin.of(api_key, path)
        pin.mark(1)
        if (old := self._pins.pop(pin_id, None)) is not None:
            old.mark(-1)
        self._pins[pin_id] = pin

    def drop(self, pin_id: str, api_key: str = "") -> bool:
        """Drop a pin of `api_key` ("" = any key); return whether there was such a pin."""
        pin = self._pins.get(pin_id)
        if pin is None or api_key not in ("", pin.api_key):
            return False
        self._pins.pop(pin_id).mark(-1)
        if pin.path:  # pinned extents may have lost their last rows
            self._store.prune(pin.path[-1].end)
        return True

    def clear(self) -> None:
        for pin_id in list(self._pins):
            self.drop(pin_id)

    def report(self, api_key: str = "") -> dict[str, Any]:
        """Return the pins of `api_key` ("" = all keys), with bytes and limit, for `/v1/cache`."""
        pins = {name: pin for name, pin in self._pins.items() if api_key in ("", pin.api_key)}
        entries = [
            {"id": pin_id, "tokens": pin.tokens, "bytes": pin.nbytes}
            for pin_id, pin in pins.items()
        ]
        limit = self._budget.bytes_max // SHARE // (self.shares(api_key) if api_key else 1)
        nbytes = _total(pins.values())[0]
        return {"pins": entries, "pinned_bytes": nbytes, "pinned_bytes_max": limit}


def _total(pins: Iterable[Pin]) -> tuple[int, int]:
    """Return the bytes and buffers that pins hold; a part of several pins counts once."""
    parts = {id(part): part for pin in pins for part in pin.parts()}.values()
    return sum(part.nbytes for part in parts), sum(part.buffers for part in parts)


def _mb(nbytes: int) -> str:
    return f"{nbytes / MB:,.1f} MB"


def _refusal(text: str) -> RequestError:
    remedy = (
        "Unpin what is not needed (DELETE /v1/cache/pins/ID), or raise CACHE_RAM_BUDGET_MB. The "
        "prompt was prefilled, and is kept for as long as there is room."
    )
    return RequestError(f"{text} {remedy}", status=409, code="pins_full")
