"""Prefills prompts forward by forward, and shares the time between prompts and answers.

A step encodes one image or prefills one chunk. The KV up to each cut is kept. An idle worker
prefills what the next requests are likely to need.
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

# Seconds that answers get for each second of a prompt's forward. Less than 1, because a forward
# beside answers takes up to a tenth longer, and work for clients between steps is not measured.
ANSWERS_SHARE: Final = 0.9
# Share of answers while short prompts are read, until these prompts owe answers OWED_S_MAX.
SHORT_SHARE: Final = 0.15
OWED_S_MAX: Final = 10.0
LOG_EVERY_S: Final = 5.0  # seconds between two log lines of a long prefill

log = logging.getLogger(__name__)


class TimeShares:
    """Says when a prompt may be read beside answers. Owner: the inference thread.

    A forward of a prompt takes as long as many decode steps. After each forward, the answers get
    nearly as much time as the forward took. So a prompt takes at most twice as long as it would
    alone, and an answer waits for one forward and one step at most. Short prompts go first: if
    several sub-agents begin together, their prompts are read one after the other with few decode
    steps between, and then their answers are decoded together. Short prompts and long prompts have
    separate debts, and the time of answers pays both. With a single debt, a series of short prompts
    would keep a long prompt waiting for ever.
    Invariant: answers owe the prompts at most the time of one forward.
    """

    def __init__(self) -> None:
        self._long, self._short = _Debt(), _Debt()
        self._step_owed_s = 0.0  # seconds owed to answers by SHORT_SHARE

    def is_answers_turn(self, is_short: bool) -> bool:
        """Return whether a decode step comes before the next forward of a prompt."""
        return self._short.owed_s > OWED_S_MAX if is_short else self._long.owed_s > 0

    @property
    def is_step_due(self) -> bool:
        """Whether a decode step comes before the next forward of a short prompt."""
        return self._step_owed_s >= 0

    @property
    def owed_s(self) -> float:
        """Seconds that prompts owe the answers."""
        return max(self._long.owed_s, self._short.owed_s)

    def record_prefill(self, seconds: float, is_short: bool) -> None:
        """Record one forward of a prompt, or one encoded image, that answers waited for."""
        assert seconds >= 0, seconds
        (self._short if is_short else self._long).add(seconds * ANSWERS_SHARE)
        self._step_owed_s += seconds * SHORT_SHARE

    def record_decode(self, seconds: float) -> None:
        """Record a decode step."""
        self.record_ahead(seconds)
        self._step_owed_s = max(min(self._step_owed_s, 0.0), -seconds)  # a step pays no later debt

    def record_ahead(self, seconds: float) -> None:
        """Record the time of the decode step that is computed ahead."""
        assert seconds >= 0, seconds
        self._long.pay(seconds)
        self._short.pay(seconds)
        self._step_owed_s -= seconds

    def clear(self) -> None:
        """Cancel all debts, because no request decodes."""
        self._long.owed_s = self._short.owed_s = self._step_owed_s = 0.0


class _Debt:
    """Counts the seconds that prompts of one kind owe the answers; negative if answers owe."""

    def __init__(self) -> None:
        self.owed_s = 0.0
        self._forward_s = 0.0  # seconds of the last forward

    def add(self, seconds: float) -> None:
        self._forward_s = seconds
        self.owed_s += seconds

    def pay(self, seconds: float) -> None:
        self.owed_s = max(self.owed_s - seconds, -self._forward_s)


class PrefillForwards:
    """Does one forward of a prompt at a time. Owner: the inference thread.

    A forward usually ends at the prompt's next cut, which depends on tokens, model and chip alone.
    In a long image, a forward ends earlier at fixed places. While other requests decode, a forward
    is shortened to about `beside_goal_s`. The KV of a shortened forward may differ from the KV of a
    cold prefill, so this KV and the KV of the rest of the prompt are kept as fast KV.
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
        """Encode one image of a prompt, or prefill its next tokens.

        Return the hidden states (1, n, hidden) of the prompt's last tokens, or None if no draft
        model needs hidden states.

        Raises:
            RequestError: an image is gone.
        """
        clock = self._config.clock
        if decoding:  # the decode step computed ahead counts as time of the answers
            began = clock()
            self._engine.synchronize()
            self._shares.record_ahead(clock() - began)
        state, hidden = request.prefill, None
        assert state is not None, request.request_id
        began, encoder_s = clock(), self._engine.encoder_s
        if not self._encode_image(request, prefilling, decoding):
            hidden = self._prefill_chunk(request, decoding)
        if decoding:
            self._shares.record_prefill(clock() - began, self._config.is_short(request))
        state.encoder_s += self._engine.encoder_s - encoder_s
        return hidden

    def _encode_image(
        self, request: Request, prefilling: Collection[Request], decoding: Collection[Request]
    ) -> bool:
        """Encode one image for the next forward; return False if no image is left.

        Encoding is a step of its own, because encoding can take long and the client may leave.
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
                times.record_chunk()
                return True
        return False

    def _prefill_chunk(self, request: Request, decoding: Collection[Request]) -> Any:
        """Prefill one chunk, and commit the KV at a cut. Return what `step` returns."""
        slot, query = request.slot, request.query
        state, times, hidden = request.prefill, request.times, None
        assert slot is not None and state is not None and times is not None, request.request_id
        number, start = request.next_cut(), request.position
        end = self._forward_end(request, decoding)
        assert start < end <= query.limit, (start, end, query.limit)
        state.is_cut_beside |= end < self._usual_end(request)
        began = self._config.clock()
        self._pace.reading_tokens = end - start
        pairs = self._config.drafts.prompt_pairs_max(request) if end == query.limit else 0
        chunk = (slot.cache, request.ids[start:end], query.images, query.adapter)
        if pairs:
            hidden = self._engine.prefill_with_hidden(*chunk, tokens_max=pairs)
        else:
            self._engine.prefill(*chunk)
        self._pace.record_chunk(end - start, self._config.clock() - began)
        request.position = end
        times.record_chunk()
        log_prefill(request)
        if end == query.cuts[number]:
            tokens, name = query.tokens[:end], query.names[number]
            kv_manager = self._kv_manager_of(request)
            kv_manager.commit(slot, tokens, name, is_fast=state.is_cut_beside)
        return hidden

    def _forward_end(self, request: Request, decoding: Collection[Request]) -> int:
        """Return the position where a prompt's next forward ends while `decoding` requests wait."""
        end = self._usual_end(request)
        return self._end_beside(request, end) if decoding else end

    def _usual_end(self, request: Request) -> int:
        """Return the position where the next forward ends while no other request decodes."""
        cut = request.query.cuts[request.next_cut()]
        return self._config.forward_end(request.position, cut)

    def _end_beside(self, request: Request, end: int) -> int:
        """Return the position where a forward to `end` stops because answers wait.

        The tokens up to `end` are split evenly: a short rest would cost a forward of its own.
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
    """Return the encoded images that running prefills still need; they may not be evicted.

    Otherwise two long images would evict each other and be encoded again for every chunk.
    """
    return {
        run.image.name
        for request in prefilling
        if request.prefill is not None
        for run in request.query.images
        # The image is encoded, and the prefill has not passed the image's last token.
        if request.position < run.end <= request.prefill.encoded_to
    }


def log_prefill(request: Request) -> None:
    """Log the progress of a long prefill every LOG_EVERY_S. Inference thread."""
    state, now = request.prefill, awake_s()
    assert state is not None and state.logged_tokens <= request.position, request.request_id
    if now - state.logged_at < LOG_EVERY_S:
        return
    # The speed since the last log line: a prefill slows down as it goes on.
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
SESSIONS_MAX: Final = 1024  # sessions with a count of idle tokens


@dataclass(frozen=True, slots=True)
class _RunningPrefill:
    """Holds an idle prefill in progress: `slot` has the KV of the beginning of `query`."""

    query: PrefixQuery
    slot: LiveSlot
    known: int  # tokens that a request would have found in the cache without this prefill


class IdlePrefill:
    """Prefills in idle time what next requests will need. Owner: the inference thread.

    Invariant: at most one slot is open, the slot of `_running`.

    With IdleMode.NEVER it does nothing, and with IdleMode.AUTO it works only on mains power. A new
    request interrupts it after the current chunk.
    """

    def __init__(self, engine: Engine, kv_manager: AnyKVManager, config: SchedulerConfig) -> None:
        self.counts: Counter[str] = Counter(ahead=0, again=0)  # tokens; again: cached before
        self._sessions: Counter[str] = Counter()  # tokens by session
        self._engine = engine
        self._kv_manager = kv_manager if isinstance(kv_manager, KVManager) else None
        self._config = config
        self._running: _RunningPrefill | None = None
        # Kept for one key: prompts to read in idle time
        self._next_prompts: deque[PrefixQuery] = deque(maxlen=NEXT_PROMPTS_MAX)

    def session_tokens(self, query: PrefixQuery, slot: LiveSlot) -> int:
        """Return how many tokens idle time has prefilled for the session of a request."""
        return self._sessions[_session(query, slot)]

    def report(self) -> dict[str, Any]:
        """Return the counts of tokens prefilled in idle time, for `/v1/cache`."""
        mode = (
            self._kv_manager.rules.idle_prefill if self._kv_manager is not None else IdleMode.NEVER
        )
        return {"mode": mode.value, "on_mains": self._config.power.is_on_mains(), **self.counts}

    def step(self) -> bool:
        """Prefill one chunk of an answer or of a next prompt; return False if there was none."""
        kv_manager, power = self._kv_manager, self._config.power
        if (
            kv_manager is None
            or kv_manager.rules.idle_prefill is IdleMode.NEVER
            or not power.is_on_mains()
        ):
            self.forget()
            return False
        if self._running is None:
            begun = self._begin(kv_manager)
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
                kv_manager.idle_work.finish(query)  # the image is gone, as is its request
                self._close()
                return True
            self._config.suspects.record_idle(query, number)
            self._prefill_to(self._running, end)
            kv_manager.commit(slot, query.tokens[:end], query.names[number])
            self._config.suspects.record(())
            self._count(self._running, position, end)
        if slot.position == query.limit:
            kv_manager.idle_work.finish(query)
            self._close()
        return True

    def add(self, query: PrefixQuery) -> None:
        """Queue a prompt that is likely to come, to be prefilled in idle time."""
        self._next_prompts.append(query)

    def stop(self) -> None:
        """Interrupt the prefill in progress and keep its KV.

        The rest of a next prompt is queued again.
        """
        running = self._running
        self._close()
        if running is None or running.known >= running.query.limit:
            return  # `idle_work.unfinished` finds answers without canonical KV again
        if len(self._next_prompts) < NEXT_PROMPTS_MAX:
            self._next_prompts.appendleft(running.query)

    def forget(self) -> None:
        self._next_prompts.clear()
        self._close()

    def _begin(self, kv_manager: KVManager) -> bool | None:
        """Open a slot for the next prefill and return None.

        If no slot was opened, return whether more queries wait.
        """
        is_foreseen = bool(self._next_prompts)  # rendered prompts first
        if is_foreseen:
            query: PrefixQuery | None = (
                self._next_prompts.pop()
            )  # the newest is likely to come first
        else:
            query = kv_manager.idle_work.unfinished(self._config.natural_cuts)
        if query is None:
            return False
        known = kv_manager.idle_work.reusable_to(query)
        slot = None
        if not self._config.suspects.forbids_idle_prefill(query):
            tokens, over = len(query.tokens), self._config.memory.over
            slot = kv_manager.idle_work.open(
                query, is_foreseen, lambda nbytes: not over(nbytes, tokens)
            )
        if slot is None:
            kv_manager.idle_work.finish(query)
            return bool(self._next_prompts)
        self._running = _RunningPrefill(query, slot, known)
        return None

    def _close(self) -> None:
        if self._running is not None and self._kv_manager is not None:
            self._kv_manager.close_spare(self._running.slot)
            self._running = None

    def _count(self, running: _RunningPrefill, start: int, end: int) -> None:
        """Count the prefilled tokens: "again" up to `running.known`, "ahead" from there."""
        again = max(0, min(end, running.known) - start)
        self.counts["again"] += again
        self.counts["ahead"] += end - start - again
        name = _session(running.query, running.slot)
        if name not in self._sessions and len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[name] += end - start

    def _prefill_to(self, running: _RunningPrefill, cut: int) -> None:
        """Prefill to the next cut in the same forwards as a request, for the same bits."""
        query, slot = running.query, running.slot
        ids, start = ids_of(query.tokens[:cut], query.images), slot.position
        assert start < cut <= query.limit, (start, cut, query.limit)
        while start < cut:
            end = self._config.forward_end(start, cut)
            chunk = ids[start:end].tolist()
            self._engine.prefill(slot.cache, chunk, query.images, query.adapter)
            start = end


def _session(query: PrefixQuery, slot: LiveSlot) -> str:
    """Return the client's name for the session, or else the number of the conversation."""
    line = slot.line
    return query.conversation.family or (str(line.number) if line is not None else "")
