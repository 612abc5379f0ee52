"""Reads prompts forward by forward, and shares the time between them and answers.

A forward encodes an image, or prefills; what each cut ends is kept. While no request is there, what
a next one would have to read is read.
"""

import bisect
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from hearth.shared.suspending_clock import awake_s
from hearth.worker.cache.image_keys import ImageName, ids_of, is_inside
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.engine.engine import Engine
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.kv.kv_transfer import IdleMode, LiveSlot
from hearth.worker.schedule.memory_guard import AnyKVManager
from hearth.worker.schedule.request_state import Request
from hearth.worker.schedule.scheduler_config import SchedulerConfig
from hearth.worker.schedule.wait_estimate import Pace

# A forward takes up to a tenth longer beside answers, and what is done between the steps, for the
# clients, is in nobody's time.
ANSWERS_SHARE: Final = 0.9
# While short prompts are read, the answers get this part of what the forwards take, for so long.
SHORT_SHARE: Final = 0.15
OWED_S_MAX: Final = 10.0
LOG_EVERY_S: Final = 5.0  # each prefill is logged so often, once it took as long

log = logging.getLogger(__name__)


class TimeShares:
    """Says when a prompt may be read beside answers. Owner: the inference thread.

    A forward of a prompt takes as long as many tokens of an answer. After each, the answers get
    nearly as much time as it took: so a prompt takes at most twice as long as it would alone, and
    an answer waits for one forward and one step at most. The answers let short prompts go first:
    sub-agents that begin together are read one after the other, with few steps between, and then
    written together. What the short ones owe them is an account of its own, which the time that a
    long prompt owes pays too: else a row of short ones would keep the long one waiting for ever.
    Invariant: what answers had too much is made up for, up to the time of one forward.
    """

    def __init__(self) -> None:
        self._long, self._short = _Debt(), _Debt()
        self._step_owed_s = 0.0  # likewise, by the share that they have of short prompts

    def is_answers_turn(self, is_short: bool) -> bool:
        """Whether answers, if there are any, come before the next forward of a prompt."""
        return self._short.owed_s > OWED_S_MAX if is_short else self._long.owed_s > 0

    @property
    def is_step_due(self) -> bool:
        """Whether answers get a step before the next forward of a short prompt."""
        return self._step_owed_s >= 0

    @property
    def owed_s(self) -> float:
        """What the answers have to get before all is even."""
        return max(self._long.owed_s, self._short.owed_s)

    def note_prefill(self, seconds: float, is_short: bool) -> None:
        """Note one forward of a prompt, or one image, that answers waited for."""
        assert seconds >= 0, seconds
        (self._short if is_short else self._long).add(seconds * ANSWERS_SHARE)
        self._step_owed_s += seconds * SHORT_SHARE

    def note_decode(self, seconds: float) -> None:
        """Note a step of the answers."""
        self.note_ahead(seconds)
        self._step_owed_s = max(min(self._step_owed_s, 0.0), -seconds)  # no step saves for others

    def note_ahead(self, seconds: float) -> None:
        """Note what went to the step that is computed ahead."""
        assert seconds >= 0, seconds
        self._long.pay(seconds)
        self._short.pay(seconds)
        self._step_owed_s -= seconds

    def clear(self) -> None:
        """Nothing decodes: nobody is owed anything."""
        self._long.owed_s = self._short.owed_s = self._step_owed_s = 0.0


class _Debt:
    """What prompts of one kind owe the answers, in seconds; negative: what these owe them."""

    def __init__(self) -> None:
        self.owed_s = 0.0
        self._forward_s = 0.0  # of their last forward

    def add(self, seconds: float) -> None:
        self._forward_s = seconds
        self.owed_s += seconds

    def pay(self, seconds: float) -> None:
        self.owed_s = max(self.owed_s - seconds, -self._forward_s)


class PrefillForwards:
    """Does one forward of a prompt at a time. Owner: the inference thread.

    A forward ends at the prompt's next cut, which tokens, model and chip alone decide. It ends
    before that amid a long image, always alike; and where answers are written meanwhile, for whom
    it should not take long. What was read in forwards of the last kind is not what a prefill alone
    would have written: it is kept as fast, and so is all of the prompt that is read behind it.
    """

    def __init__(
        self,
        engine: Engine,
        config: SchedulerConfig,
        kv_manager_of: Callable[[Request], AnyKVManager],
        pace: Pace,
        shares: TimeShares,
    ) -> None:
        self._engine = engine
        self._config = config
        self._kv_manager_of = kv_manager_of
        self._pace = pace
        self._shares = shares

    def step(
        self, request: Request, prefilling: Collection[Request], decoding: Collection[Request]
    ) -> Any:
        """Encode one image of a prompt, or read its next tokens.

        Return the hidden states (1, n, hidden) of its last tokens, for a draft model; or None.

        Raises:
            RequestError: an image cannot be had any more.
        """
        clock = self._config.clock
        if decoding:  # what is computed ahead for them is theirs
            began = clock()
            self._engine.synchronize()
            self._shares.note_ahead(clock() - began)
        state, hidden = request.prefill, None
        assert state is not None, request.request_id
        began, encoder_s = clock(), self._engine.encoder_s
        if not self._encode_image(request, prefilling, decoding):
            hidden = self._prefill_chunk(request, decoding)
        if decoding:
            self._shares.note_prefill(clock() - began, self._config.is_short(request))
        state.encoder_s += self._engine.encoder_s - encoder_s
        return hidden

    def _encode_image(
        self, request: Request, prefilling: Collection[Request], decoding: Collection[Request]
    ) -> bool:
        """Encode the next image that the next forward reads, if one has to be; say whether so.

        A step of its own: it can take long, and who left meanwhile is not prefilled for.
        """
        end = self._forward_end(request, decoding)
        start, images, state, times = (
            request.position,
            request.query.images,
            request.prefill,
            request.times,
        )
        assert state is not None and times is not None, request.request_id
        for run in [run for run in images if run.start < end and start < run.end]:
            state.encoded_to = max(state.encoded_to, run.end)
            if self._engine.encode(run.image, begun_images(prefilling)):
                times.note_chunk()
                return True
        return False

    def _prefill_chunk(self, request: Request, decoding: Collection[Request]) -> Any:
        """Prefill one chunk; keep what was read at each cut. Return as `step`."""
        slot, query = request.slot, request.query
        state, times, hidden = request.prefill, request.times, None
        assert slot is not None and state is not None and times is not None, request.request_id
        number, start = request.next_cut(), request.position
        end = self._forward_end(request, decoding)
        assert start < end <= query.limit, (start, end, query.limit)
        state.is_cut_beside |= end < self._quiet_end(request)
        began = self._config.clock()
        self._pace.reading_tokens = end - start
        pairs = self._config.drafts.prompt_pairs_max(request) if end == query.limit else 0
        chunk = (slot.cache, request.ids[start:end], query.images, query.adapter)
        if pairs:
            hidden = self._engine.prefill_with_hidden(*chunk, tokens_max=pairs)
        else:
            self._engine.prefill(*chunk)
        self._pace.note_chunk(end - start, self._config.clock() - began)
        request.position = end
        times.note_chunk()
        log_prefill(request)
        if end == query.cuts[number]:
            tokens, name = query.tokens[:end], query.names[number]
            manager = self._kv_manager_of(request)
            manager.commit(slot, tokens, name, is_fast=state.is_cut_beside)
        return hidden

    def _forward_end(self, request: Request, decoding: Collection[Request]) -> int:
        """Return where the next forward of a prompt ends beside these answers."""
        end = self._quiet_end(request)
        return self._end_beside(request, end) if decoding else end

    def _quiet_end(self, request: Request) -> int:
        """Return where it ends if nobody waits for it."""
        cut = request.query.cuts[request.next_cut()]
        return self._config.forward_end(request.position, cut)

    def _end_beside(self, request: Request, end: int) -> int:
        """Return where a forward ends that answers wait for and that would end at `end`.

        What is left is split evenly: a short rest would cost a forward of its own.
        """
        goal_s, tokens_min = self._config.beside_goal_s, self._config.beside_tokens_min
        left = end - request.position
        if not goal_s or left < 2 * tokens_min:
            return end
        tokens = max(tokens_min, int(self._pace.prefill_tokens_per_s * goal_s))
        count = min(-(-left // tokens), left // tokens_min)
        near = request.position + -(-left // count)
        return end if is_inside(request.query.tokens, near) else near


def begun_images(prefilling: Collection[Request]) -> set[ImageName]:
    """Return the images that prefills need yet and had encoded: no other takes their place.

    Else two long ones would be encoded anew for every chunk, in turns.
    """
    return {
        run.image.name
        for request in prefilling
        if request.prefill is not None
        for run in request.query.images
        # Looked at, and not read to its end.
        if request.position < run.end <= request.prefill.encoded_to
    }


def log_prefill(request: Request) -> None:
    """Log how far a long prefill has come, unless it was logged just now. Inference thread."""
    state, now = request.prefill, awake_s()
    assert state is not None and state.logged_tokens <= request.position, request.request_id
    if now - state.logged_at < LOG_EVERY_S:
        return
    # The newest speed: the further a prompt is, the slower it is read.
    tokens_per_s = (request.position - state.logged_tokens) / (now - state.logged_at)
    state.logged_at, state.logged_tokens = now, request.position
    log.info(
        "prefill request=%s done=%d of=%d tokens_per_s=%.0f left_s=%.0f",
        request.request_id,
        request.position,
        request.prompt_tokens,
        tokens_per_s,
        request.left_tokens / tokens_per_s if tokens_per_s else 0.0,
    )


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
        keeper, power = self._keeper, self._config.power
        if keeper is None or keeper.rules.idle_prefill is IdleMode.NEVER or not power.is_on_mains():
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
                keeper.idle_work.finish(query)  # its file is gone with the request it came in
                self._close()
                return True
            self._config.suspects.note_idle(query, number)
            self._prefill_to(self._running, end)
            keeper.commit(slot, query.tokens[:end], query.names[number])
            self._config.suspects.note(())
            self._count(self._running, position, end)
        if slot.position == query.limit:
            keeper.idle_work.finish(query)
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

    def _begin(self, keeper: KVManager) -> bool | None:
        """Open a slot for what is prefilled next; None where one is open now.

        Else say whether there is more to look at.
        """
        is_foreseen = bool(self._next_prompts)  # rendered prompts first
        if is_foreseen:
            query: PrefixQuery | None = self._next_prompts.pop()  # the newest is asked soonest
        else:
            query = keeper.idle_work.unfinished(self._config.natural_cuts)
        if query is None:
            return False
        known = keeper.idle_work.reusable_to(query)
        slot = None
        if not self._config.suspects.spoils(query):
            tokens, over = len(query.tokens), self._config.memory.over
            slot = keeper.idle_work.open(
                query, is_foreseen, lambda nbytes: not over(nbytes, tokens)
            )
        if slot is None:
            keeper.idle_work.finish(query)
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


def _session(query: PrefixQuery, slot: LiveSlot) -> str:
    """Return the name of a session: what its client calls it, or else its line's number."""
    line = slot.line
    return query.conversation.family or (str(line.number) if line is not None else "")
