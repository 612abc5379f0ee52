"""Prefills in idle time what a next request would have to."""

import bisect
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Final

from hearth.worker.cache.image_keys import ids_of
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.engine.engine import Engine
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.kv.kv_transfer import IdleMode, LiveSlot
from hearth.worker.schedule.memory_guard import AnyKVManager
from hearth.worker.schedule.scheduler_config import SchedulerConfig

NEXT_PROMPTS_MAX: Final = 4  # rendered next prompts that wait for idle time
SESSIONS_MAX: Final = 1024  # whose idle tokens are counted


@dataclass(frozen=True, slots=True)
class _Prefill:
    """An idle prefill in progress: `slot` holds the beginning of `query`."""

    query: PrefixQuery
    slot: LiveSlot
    known: int  # up to where a request would have gone on from what was there


class IdlePrefill:
    """Does the scheduler's work while no request is there. Owner: the inference thread.

    Invariant: at most one slot is open here, that of `_running`.

    By IdleMode.AUTO it reads what the session's next request would have to, and only while the
    machine is on mains power; by IdleMode.NEVER nothing. A new request interrupts it after the
    chunk, or the image.
    """

    def __init__(self, engine: Engine, kv_manager: AnyKVManager, config: SchedulerConfig) -> None:
        self.counts: Counter[str] = Counter(ahead=0, again=0)  # tokens; again: known before
        self._sessions: Counter[str] = Counter()  # tokens by session
        self._engine = engine
        self._keeper = kv_manager if isinstance(kv_manager, KVManager) else None
        self._config = config
        self._running: _Prefill | None = None
        # Kept for one key: prompts that idle time is to read
        self._next_prompts: deque[PrefixQuery] = deque(maxlen=NEXT_PROMPTS_MAX)

    def session_tokens(self, query: PrefixQuery, slot: LiveSlot) -> int:
        """Return how many tokens were read here for the session of a request."""
        return self._sessions[_session(query, slot)]

    def report(self) -> dict[str, Any]:
        """Return for `/v1/cache` what was read: ahead of a request, or once more."""
        mode = self._keeper.rules.idle_prefill if self._keeper is not None else IdleMode.NEVER
        return {"mode": mode.value, "on_mains": self._config.power.is_on_mains(), **self.counts}

    def step(self) -> bool:
        """Prefill one chunk of an answer, or of a next prompt; say whether there was any."""
        keeper = self._keeper
        if keeper is None or not self._is_allowed(keeper):
            self.forget()
            return False
        if self._running is None:
            begun = self._begin(keeper)
            if begun is not None:
                return begun
        assert self._running is not None
        query, slot = self._running.query, self._running.slot
        position = slot.position
        assert position <= query.limit, (position, query.limit)
        if position < query.limit:
            number = bisect.bisect_right(query.cuts, position)
            end = query.cuts[number]
            if not self._engine.has_encoded(query.images, position, end):
                keeper.idle_work.settle(query)  # its file is gone with the request it came in
                self._close()
                return True
            self._config.suspects.note_idle(query, number)
            self._prefill_to(self._running, end)
            keeper.commit(slot, query.tokens[:end], query.names[number])
            self._config.suspects.note(())
            self._count(self._running, position, end)
        if slot.position == query.limit:
            keeper.idle_work.settle(query)
            self._close()
        return True

    def add(self, query: PrefixQuery) -> None:
        """Prefill `query` when there is time: a prompt that is likely to come."""
        self._next_prompts.append(query)

    def stop(self) -> None:
        """Interrupt the prefill in progress; what was prefilled of it is kept.

        The rest comes later, where its session has not read it by then.
        """
        running = self._running
        self._close()
        if running is None or running.known >= running.query.limit:
            return  # a slot that lacks a canonical copy is found again
        if len(self._next_prompts) < NEXT_PROMPTS_MAX:
            self._next_prompts.appendleft(running.query)

    def forget(self) -> None:
        self._next_prompts.clear()
        self._close()

    def _is_allowed(self, keeper: KVManager) -> bool:
        return keeper.rules.idle_prefill is IdleMode.AUTO and self._config.power.is_on_mains()

    def _begin(self, keeper: KVManager) -> bool | None:
        """Open a slot for what is prefilled next; None where one is open now.

        Else say whether there is more to look at.
        """
        query, is_foreseen = self._next(keeper)
        if query is None:
            return False
        known = keeper.idle_work.known_to(query)
        slot = None
        if not self._config.suspects.spoils(query):
            tokens, over = len(query.tokens), self._config.memory.over
            slot = keeper.idle_work.open(
                query, is_foreseen, lambda nbytes: not over(nbytes, tokens)
            )
        if slot is None:
            keeper.idle_work.settle(query)
            return bool(self._next_prompts)
        self._running = _Prefill(query, slot, known)
        return None

    def _close(self) -> None:
        if self._running is not None and self._keeper is not None:
            self._keeper.close_spare(self._running.slot)
            self._running = None

    def _count(self, running: _Prefill, start: int, end: int) -> None:
        """Count what was read: behind what was known it would have to be read by a request."""
        again = max(0, min(end, running.known) - start)
        self.counts["again"] += again
        self.counts["ahead"] += end - start - again
        name = _session(running.query, running.slot)
        if name not in self._sessions and len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[name] += end - start

    def _prefill_to(self, running: _Prefill, cut: int) -> None:
        """Prefill to the next cut in the forwards that a request takes: others round otherwise."""
        query, slot = running.query, running.slot
        ids, start = ids_of(query.tokens[:cut], query.images), slot.position
        assert start < cut <= query.limit, (start, cut, query.limit)
        while start < cut:
            end = self._config.forward_end(start, cut)
            chunk = ids[start:end].tolist()
            self._engine.prefill(slot.cache, chunk, query.images, query.adapter)
            start = end

    def _next(self, keeper: KVManager) -> tuple[PrefixQuery | None, bool]:
        """Return what is prefilled next, and whether it was foreseen: rendered prompts first."""
        if self._next_prompts:
            return self._next_prompts.pop(), True  # the newest first: it is asked soonest
        return keeper.idle_work.unfinished(self._config.natural_cuts), False


def _session(query: PrefixQuery, slot: LiveSlot) -> str:
    """Return the name of a session: what its client calls it, or else its line's number."""
    line = slot.line
    return query.conversation.family or (str(line.number) if line is not None else "")
