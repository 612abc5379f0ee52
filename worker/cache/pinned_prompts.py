"""Holds pins: prompts that clients asked never to evict, within half of the budget for all keys."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hearth.shared.errors import RequestError
from hearth.worker.cache.extent_store import MB, Extent, ExtentStore, KVArrays, PrefixNode

log = logging.getLogger(__name__)

PINS_MAX: Final = 1_000
SHARE: Final = 2  # the part of the budget that pins may hold: one half


@dataclass(frozen=True, slots=True)
class Pin:
    """One prompt's path from the root, and what was there to resume from when it was pinned."""

    api_key: str  # the API key that it belongs to
    path: tuple[Extent, ...]
    windows: tuple[Extent, ...]  # those whose window is pinned
    snapshots: tuple[PrefixNode, ...]  # those whose snapshot is pinned

    @classmethod
    def of(cls, key: str, path: Sequence[Extent]) -> "Pin":
        """Return a pin of a path, and of what is there of its windows and snapshots."""
        windows = tuple(extent for extent in path if extent.window is not None)
        snapshots = tuple(extent.end for extent in path if extent.end.snapshot is not None)
        return cls(key, tuple(path), windows, snapshots)

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
            *(joint.snapshot for joint in self.snapshots),
        ]
        return (part for part in parts if part is not None)

    def mark(self, count: int) -> None:
        """Add `count`, 1 or -1, to the pins of all that it holds."""
        for extent in self.path:
            extent.pinned += count
            assert extent.pinned >= 0, extent
        for extent in self.windows:
            extent.window_pinned += count
            assert extent.window_pinned >= 0, extent
        for joint in self.snapshots:
            joint.snapshot_pinned += count
            assert joint.snapshot_pinned >= 0, joint


class Pins:
    """All pins, by the id of the request that asked for each.

    Each key has an equal share of `SHARE` of the budget, which no other key takes, nor learns of.
    Keys that nobody named beforehand (LiteLLM's) are counted as they pin: then shares get smaller,
    and who holds more than one gives up its oldest pins as others need the room.
    Invariant: what they hold together fits `SHARE` of the budget, so that the rest of it can
    always be freed for others.
    Owner: the inference thread.
    """

    def __init__(self, store: ExtentStore, keys: int = 1) -> None:
        """`keys` share it at least, whether they pin or not."""
        self._store = store
        self._budget = store.budget
        self._keys = keys
        # Kept for one key: pinned prompts
        self._pins: dict[str, Pin] = {}

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    @property
    def nbytes(self) -> int:
        """What they hold together."""
        return _total(self)[0]

    def check(
        self, pin_id: str, key: str, path: Sequence[Extent], nbytes: int, buffers: int
    ) -> None:
        """Refuse a path, with `nbytes` in `buffers` still to be copied for it, that is too much.

        What others hold beyond their share makes room for one that is not.

        Raises:
            RequestError: 409; the key's pins would hold more than its share, or be too many.
        """
        shares = self.shares(key)
        mine = Pin("", tuple(path), tuple(path), tuple(extent.end for extent in path))
        others = [pin for name, pin in self._pins.items() if name != pin_id]
        own = [pin for pin in others if pin.api_key == key]
        if len(own) >= PINS_MAX // shares:
            raise _refusal(f"There are {len(own):,} pins, as many as there may be.")
        held, both = _total(own), _total([*own, mine])
        bytes_max = self._budget.bytes_max // SHARE // shares
        if both[0] + nbytes > bytes_max:
            raise _refusal(
                f"The prompt's KV takes {_mb(both[0] - held[0] + nbytes)} more, and pins, which "
                f"hold {_mb(held[0])}, may hold {_mb(bytes_max)}: half of the cache"
                f"{', shared among its keys' if shares > 1 else ''}."
            )
        buffers_max = self._budget.buffers_max // SHARE // shares
        if both[1] + buffers > buffers_max:
            raise _refusal(
                f"The prompt's KV takes {both[1] - held[1] + buffers:,} buffers more, and pins, "
                f"which hold {held[1]:,}, may hold {buffers_max:,}."
            )
        while self.part([*others, mine], nbytes, buffers) > 1:
            others.remove(self._give_up_one(key))

    def shares(self, key: str) -> int:
        """Return among how many keys the pins' part is shared, if `key` is one of them."""
        return max(self._keys, len({key, *(pin.api_key for pin in self)}))

    def part(self, pins: Sequence[Pin], nbytes: int = 0, buffers: int = 0) -> float:
        """Return what part `pins` take, and as much more, of what all may: bytes, buffers, pins."""
        held = _total(pins)
        return max(
            (held[0] + nbytes) / max(1, self._budget.bytes_max // SHARE),
            (held[1] + buffers) / max(1, self._budget.buffers_max // SHARE),
            len(pins) / PINS_MAX,
        )

    def _give_up_one(self, key: str) -> Pin:
        """Give up, and return, the oldest pin of the key that takes most, beside `key`."""
        keys = {pin.api_key for pin in self} - {key}
        most = max(keys, key=lambda each: self.part([pin for pin in self if pin.api_key == each]))
        pin_id, pin = next(row for row in self._pins.items() if row[1].api_key == most)
        log.info("a pin is given up for another key's, which holds less than its share")
        self.drop(pin_id)
        return pin

    def add(self, pin_id: str, key: str, path: Sequence[Extent]) -> None:
        """Pin a path, which `check` let pass, and what is there of its windows and snapshots.

        A pin of that id is replaced.
        """
        assert path and path[0].start.arrival is None, "a path begins at the root"
        pin = Pin.of(key, path)
        pin.mark(1)
        if (old := self._pins.pop(pin_id, None)) is not None:
            old.mark(-1)
        self._pins[pin_id] = pin

    def drop(self, pin_id: str, key: str = "") -> bool:
        """Give up a pin of `key`, "" = anyone's; say whether there was one."""
        pin = self._pins.get(pin_id)
        if pin is None or key not in ("", pin.api_key):
            return False
        self._pins.pop(pin_id).mark(-1)
        if pin.path:  # a slot may have let go of what had no bytes of its own meanwhile
            self._store.prune(pin.path[-1].end)
        return True

    def clear(self) -> None:
        for pin_id in list(self._pins):
            self.drop(pin_id)

    def report(self, key: str = "") -> dict[str, Any]:
        """Return the pins of `key`, "" = everyone's, and what they hold and may: `/v1/cache`."""
        pins = {name: pin for name, pin in self._pins.items() if key in ("", pin.api_key)}
        rows = [
            {"id": pin_id, "tokens": pin.tokens, "bytes": pin.nbytes}
            for pin_id, pin in pins.items()
        ]
        limit = self._budget.bytes_max // SHARE // (self.shares(key) if key else 1)
        held = _total(pins.values())[0]
        return {"pins": rows, "pinned_bytes": held, "pinned_bytes_max": limit}


def _total(pins: Iterable[Pin]) -> tuple[int, int]:
    """Return the bytes and buffers of what pins hold, each counted once."""
    once = {id(part): part for pin in pins for part in pin.parts()}.values()
    return sum(part.nbytes for part in once), sum(part.buffers for part in once)


def _mb(nbytes: int) -> str:
    return f"{nbytes / MB:,.1f} MB"


def _refusal(text: str) -> RequestError:
    remedy = (
        "Unpin what is not needed (DELETE /v1/cache/pins/ID), or raise CACHE_RAM_BUDGET_MB. The "
        "prompt was prefilled, and is kept for as long as there is room."
    )
    return RequestError(f"{text} {remedy}", status=409, code="pins_full")
