"""Orders idle live slots by how little they are needed, and tells which of them are too many."""

from collections.abc import Callable, Container, Iterable

from hearth.worker.kv.live_slot import LiveSlot


def least_needed(slots: Iterable[LiveSlot], spared: Container[int | None] = ()) -> list[LiveSlot]:
    """Return the idle ones of `slots` in the order in which they make way.

    `spared` has the numbers of those that do not.
    """
    idle = (slot for slot in slots if not slot.is_busy and slot.number not in spared)
    return sorted(idle, key=_rank)


def surplus(
    slots: Iterable[LiveSlot], nbytes: Callable[[LiveSlot], int], bytes_max: int
) -> list[LiveSlot]:
    """Return the idle slots that make way so that the rest takes `bytes_max` at most.

    The one that is needed most stays in any case: its conversation goes on in it without a copy.
    """
    held = 0
    stay = least_needed(slots)[::-1]
    for count, slot in enumerate(stay):
        held += nbytes(slot)
        if count and held > bytes_max:
            return stay[count:][::-1]
    return []


def _rank(slot: LiveSlot) -> tuple[bool, bool, float]:
    """Rank by last use: a copy brings a slot back, so that it matters who comes next.

    That is an agent amid its turns, not the one that waits for it, however much likelier the latter
    comes at all. A title or a topic check comes once.
    """
    is_side = slot.line is not None and slot.line.is_side
    return (not slot.is_spare, not is_side, slot.used_at)
