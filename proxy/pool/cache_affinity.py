"""Chooses the worker that has most of a request in its cache, unless that one is too busy."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from hearth.proxy.pool.worker_link import WorkerLink
from hearth.shared.wire_messages import Prompt

MARKS_MAX: Final = 16_384
LOAD_GAP_MAX: Final = 4  # beyond that reading a prompt anew is sooner done than waiting

Mark = tuple[str, str, str | bytes]  # an API key's digest, a model, a session or a link


def marks_of(prompt: Prompt, model: str = "") -> list[Mark]:
    """Return what a worker can be found by that was sent `prompt` for `model`: weakest first.

    First the session, then each prefix of the conversation, by its link; nothing of one API key's
    is found by another's, nor of one model's.
    """
    speaker = prompt.speaker
    names: list[str | bytes] = [speaker.session, *(name.link for name in prompt.names)]
    return [(speaker.key, model, name) for name in dict.fromkeys(names) if name]


class CacheAffinity:
    """Remembers which worker was sent what. Owner: the event loop.

    Invariant: at most MARKS_MAX marks; the ones that were not sent for longest go first.
    """

    def __init__(self, load_gap_max: int = LOAD_GAP_MAX) -> None:
        """`load_gap_max`: requests that a worker may hold beyond the least loaded one's."""
        self._load_gap_max = load_gap_max
        # Kept for one key: which worker has a conversation, by its session's name and digests
        self.worker_ids: OrderedDict[Mark, int] = OrderedDict()

    def choose(self, candidates: Iterable[WorkerLink], marks: list[Mark]) -> WorkerLink | None:
        """Return the candidate that was sent the strongest of `marks`; None where there is none.

        It is the least loaded one, the lowest id among equals, where none was sent any, and where
        the one that was is too busy.
        """
        ready = {row.worker_id: row for row in candidates}
        idle = min(ready.values(), key=lambda row: (row.load, row.worker_id), default=None)
        if idle is None:
            return None
        known = (self.worker_ids.get(mark) for mark in reversed(marks))
        found = next((ready[row] for row in known if row is not None and row in ready), idle)
        assert found.load >= idle.load, (found.worker_id, found.load, idle.load)
        return found if found.load - idle.load <= self._load_gap_max else idle

    def remember(self, marks: list[Mark], worker_id: int) -> None:
        """Note that the worker was sent what `marks` stand for, unless another was before.

        A fork that is sent elsewhere because its parent's worker is busy takes nothing from there.
        """
        for mark in reversed(marks):  # so that what conversations share is kept longest
            self.worker_ids.setdefault(mark, worker_id)
            self.worker_ids.move_to_end(mark)
        while len(self.worker_ids) > MARKS_MAX:
            self.worker_ids.popitem(last=False)

    def forget(self, worker_id: int) -> None:
        """Drop what was noted of a worker that is gone, and its cache with it."""
        for mark in [mark for mark, row in self.worker_ids.items() if row == worker_id]:
            del self.worker_ids[mark]
