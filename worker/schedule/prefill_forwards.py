"""Reads prompts forward by forward, and shares the time between them and answers.

A forward encodes an image, or prefills; what each cut ends is kept.
"""

import logging
from collections.abc import Callable, Collection
from typing import Any, Final

from hearth.shared.suspending_clock import awake_s
from hearth.worker.cache.image_keys import ImageName, is_inside
from hearth.worker.engine.engine import Engine
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
            if self._engine.encode(run.picture, begun_images(prefilling)):
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
        run.picture.name
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
