"""What a request needs before it may have a slot: its KV back from disk, and room in memory."""

import logging
from collections import Counter
from typing import Final

from hearth.shared.wire_messages import Failed
from hearth.worker.schedule.request_state import RecallDone, Request
from hearth.worker.schedule.scheduler_interfaces import KVManagerInterface, SchedulerRules

RECALLS_MAX: Final = 2  # waits for the disk: on arrival, and if that has made way before its turn
SPARE_ROWS: Final = 512  # a slot has room for so much of an answer; it grows for a longer one

log = logging.getLogger(__name__)


class Admission:
    """Looks after the requests that wait. Owner: the inference thread."""

    def __init__(
        self, keeper: KVManagerInterface, rules: SchedulerRules, counts: "Counter[str]"
    ) -> None:
        """`counts` gets what happens here."""
        self._keeper = keeper
        self._apart = keeper.apart
        self._rules = rules
        self._counts = counts
        self._epoch = 0  # times that the cache was emptied

    def keeper_of(self, request: Request) -> KVManagerInterface:
        return self._keeper if request.is_kept else self._apart

    # ------------------------------------------------------------ the disk

    def ask_disk(self, request: Request) -> bool:
        """Have read what the prompt needs from disk; say whether it waits for that."""
        query, epoch = request.query, self._epoch
        request.recall = self.keeper_of(request).recall(
            query, lambda records: self._rules.post(RecallDone(request, records, epoch))
        )
        if request.recall is None:
            return False
        request.recalls += 1
        request.kept_tokens = request.recall.position
        return True

    def asks_again(self, request: Request) -> bool:
        """Have read from disk what was kept of a prompt when it came, and has made way since."""
        plan = self.keeper_of(request).plan(request.query)
        is_less = plan.position < request.kept_tokens
        return is_less and request.recalls < RECALLS_MAX and self.ask_disk(request)

    def recalled(self, found: RecallDone) -> None:
        """Take in what was read from disk; the request it was read for may have a slot now."""
        request = found.request
        if found.epoch != self._epoch:  # the cache was emptied meanwhile
            request.recall = None
            return
        tokens = self._keeper.take_in(found.records, request.query)
        if request.recall is None:  # it has given up waiting: others may go on from this
            self._counts["recalls_late"] += 1
            return
        request.recall, request.recalled_tokens = None, request.recalled_tokens + tokens
        request.kept_tokens = self._keeper.plan(request.query).position

    def waits_for_disk(self, request: Request) -> bool:
        """Whether the disk has something to bring yet; a prompt is read where that takes long."""
        if request.recall is None or not request.recall.is_late:
            return request.recall is not None
        self._counts["recalls_given_up"] += 1
        request.recall, request.recalls = None, RECALLS_MAX
        request.kept_tokens = self._keeper.plan(request.query).position
        return False

    def forget(self) -> None:
        """The cache is emptied: what is being read from disk does not come back."""
        self._epoch += 1

    # ------------------------------------------------------------ memory

    def makes_room(self, request: Request, is_last: bool) -> tuple[bool, int]:
        """Make room for its slot; say whether there is, and how many bytes that takes.

        `is_last`: nobody runs whose end would make room.
        """
        keeper, query, rows = self.keeper_of(request), request.query, rows_of(request)
        times = 1 if is_last else 2  # a batch copies what joins it
        return self._rules.memory.admits(
            self._keeper,
            query,
            lambda: times * keeper.slot_cost(query, rows),
            times * self._apart.slot_cost(query, rows),
            is_last,
        )

    def no_room(self, request: Request, cost: int) -> Failed:
        """Refuse a prompt that does not fit though all else has made way."""
        self._counts["memory_refusals"] += 1
        text = self._rules.memory.refusal(request.prompt_tokens, cost)
        log.warning("no memory request=%s %s", request.request_id, text)
        return Failed(request.request_id, 400, "context_length_exceeded", text)


def rows_of(request: Request) -> int:
    """Return for how many tokens a slot has room at first."""
    return request.prompt_tokens + min(request.tokens_max, SPARE_ROWS)
