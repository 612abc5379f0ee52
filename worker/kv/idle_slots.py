"""Orders idle live slots by how little they are needed, and tells which of them are too many."""

from collections.abc import Callable, Container, Iterable

from hearth.worker.kv.live_slot import LiveSlot


def least_needed(
    slots: Iterable[LiveSlot], now: float, spared: Container[int | None] = ()
) -> list[LiveSlot]:
    """Return the idle ones of `slots` in the order in which they make way.

    `spared` has the numbers of those that do not.
    """
    idle = (slot for slot in slots if not slot.is_busy and slot.number not in spared)
    return sorted(idle, key=lambda slot: _rank(slot, now))


def surplus(
    slots: Iterable[LiveSlot], nbytes: Callable[[LiveSlot], int], bytes_max: int, now: float
) -> list[LiveSlot]:
    """Return the idle slots that make way so that the rest takes `bytes_max` at most.

    The one that is needed most stays in any case: its conversation goes on in it without a copy.
    """
    held = 0
    stay = least_needed(slots, now)[::-1]
    for count, slot in enumerate(stay):
        held += nbytes(slot)
        if count and held > bytes_max:
            return stay[count:][::-1]
    return []


def _rank(slot: LiveSlot, now: float) -> tuple[bool, float, float]:
    likelihood = slot.line.likelihood(now, 0) if slot.line is not None else 0.0
    return (not slot.is_spare, likelihood, slot.used_at)
