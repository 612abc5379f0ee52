"""Advances all requests together, one prefill chunk and one decode step at a time."""

import functools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import (
    CallStart,
    Delta,
    Failed,
    Finished,
    Progress,
    TokenLogprob,
    Up,
    Usage,
)
from hearth.worker.cache.image_keys import ImageName
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.engine import decoder
from hearth.worker.engine.decoder import SampledToken
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.sampler import TokenChoice
from hearth.worker.schedule.admission import Admission, rows_of
from hearth.worker.schedule.fair_queue import give_turn, in_turn
from hearth.worker.schedule.idle_prefill import IdlePrefill
from hearth.worker.schedule.progress_log import tell_prefill
from hearth.worker.schedule.request_state import RecallDone, Request
from hearth.worker.schedule.scheduler_interfaces import KVManagerInterface, SchedulerRules
from hearth.worker.schedule.wait_estimate import Load, Pace, Work
from hearth.worker.stream.answer_splitter import AnswerPart
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.stream.logprobs import describe
from hearth.worker.stream.output_processor import OutputPiece

log = logging.getLogger(__name__)


class Scheduler:
    """Decides what the model computes next. Owner: the inference thread.

    A request waits, is prefilled from where the kept KV ends, decodes, and ends in exactly one
    Finished. Between two chunks of a prefill every decoding sequence gets its next token. Of
    several prefills the oldest and the shortest take turns, so that a short prompt need not wait
    for a long one, nor the long one for ever. A request whose beginning another is prefilling
    waits for that one, without a slot, and takes over where it ends.
    """

    def __init__(
        self,
        engine: Engine,
        keeper: KVManagerInterface,
        vocabulary: Vocabulary,
        end_ids: frozenset[int],
        choose: Callable[[Request], TokenChoice],
        rules: SchedulerRules,
    ) -> None:
        self._engine = engine
        self._keeper = keeper
        self._apart = keeper.apart
        self._vocabulary = vocabulary
        self._end_ids = end_ids
        self._choose = choose
        self._rules = rules
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []  # oldest first
        self._decoding: dict[str, Request] = {}
        self._is_oldest_next = True
        self._turn = 0  # slots that were given
        self._pace = Pace()
        self._ahead = IdlePrefill(engine, keeper, rules)
        self.counts: Counter[str] = Counter()
        self._admission = Admission(keeper, rules, self.counts)
        self.steps = 0

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._decoding)

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def report(self) -> dict[str, Any]:
        """Return for `/v1/cache` what ended requests early, and the memory that is held."""
        memory = self._rules.memory
        return {
            "ends": dict(self.counts),
            "memory_bytes": memory.used(),
            "memory_limit_bytes": memory.limit,
        }

    def load(self, arriving: int) -> Load:
        """Return what there is to do, with `arriving` requests that are being rendered. Any thread.

        Each copy is made in one step of the interpreter: the owner changes nothing meanwhile.
        """
        running = [*self._prefilling, *self._decoding.values()]
        waiting = list(self._waiting)
        now = time.monotonic()
        wait_s = self._pace.wait_s(
            [request.work(now) for request in running[: self._rules.slots_max]],
            [*(request.work(now) for request in waiting), *[Work(None)] * arriving],
            self._rules.slots_max,
        )
        queue = [request.request_id for request in in_turn(waiting, self._turn)]
        return Load(len(running), queue, wait_s)

    def submit(self, request: Request) -> Progress:
        """Take a request; it waits for a slot. Return how much of it is kept now.

        Others may add to that before the request has a slot.
        """
        self._ahead.stop()
        request.turn = self._turn
        self._waiting.append(request)
        keeper = self._admission.keeper_of(request)
        request.kept_tokens = keeper.plan(request.query).position
        self._admission.ask_disk(request)
        return Progress(request.request_id, request.kept_tokens, request.prompt_tokens)

    def recalled(self, found: RecallDone) -> None:
        """Take in what was read from disk; the request it was read for may have a slot now."""
        self._admission.recalled(found)

    @property
    def is_blocked(self) -> bool:
        """Whether nothing can be computed before the disk has answered."""
        waits = all(request.recall is not None for request in self._waiting)
        return not (self._prefilling or self._decoding) and waits

    def step(self) -> Iterator[Up]:
        """Do one chunk and one decode step; yield what clients are told, as soon as it holds."""
        self.steps += 1
        yield from self._drop_gone()
        yield from self._end_expired()
        yield from self._give_slots()
        yield from self._prefill()
        yield from self._shed()
        yield from self._decode()

    def work_ahead(self) -> bool:
        """With nothing else to do, do one chunk of idle work; say whether there was any."""
        assert self.is_idle
        return self._ahead.step()

    def foresee(self, query: PrefixQuery) -> None:
        """Prefill `query` when there is nothing else to do: a prompt that will be asked."""
        self._ahead.foresee(query)

    @property
    def idle_tokens(self) -> int:
        """Tokens prefilled in idle time, for no request."""
        return self._ahead.tokens

    def forget(self) -> None:
        """Empty the cache; running requests go on with what they have."""
        self._admission.forget()
        self._ahead.forget()
        self._keeper.clear()
        for request in self._waiting:
            request.kept_tokens = 0

    def _drop_gone(self) -> Iterator[Up]:
        """End the requests whose client left or whose lease ran out."""
        for request in [r for r in self._waiting if r.ticket.is_gone]:
            self._waiting.remove(request)
            yield self._end(request, "cancelled")
        for request in [r for r in self._prefilling if r.ticket.is_gone]:
            self._prefilling.remove(request)
            yield self._end(request, "cancelled")
        for request in [r for r in self._decoding.values() if r.ticket.is_gone]:
            yield self._end(request, "cancelled")

    def _end_expired(self) -> Iterator[Up]:
        """End what has had its time; the prefill that was done is kept, its slot is free.

        Of the prompts only the oldest has a turn of its own: the others may be overtaken.
        """
        for request in [*self._prefilling[:1], *self._decoding.values()]:
            why = self._rules.watchdog.verdict(request)
            if why is None:
                continue
            log.warning("watchdog ends request=%s: %s", request.request_id, why)
            self.counts["watchdog_ends"] += 1
            request.is_expired = True
            if request.request_id not in self._decoding:
                self._prefilling.remove(request)
            yield from self._finish(request, "length")

    def _give_slots(self) -> Iterator[Up]:
        """Give each free slot to whoever's turn it is.

        For memory too the first in turn waits, until those that run give it back: were it
        overtaken, it might wait for ever.
        """
        while self.running < self._rules.slots_max:
            request = next(filter(self._can_begin, in_turn(self._waiting, self._turn)), None)
            if request is None:
                return
            has_room, cost = self._admission.makes_room(request, is_last=not self.running)
            if not has_room and self._engine.release_images(self._begun_images()):
                continue
            if self.running and not has_room:
                return
            if has_room and self._admission.asks_again(request):
                continue
            self._waiting.remove(request)
            self._turn = give_turn(request, self._waiting, self._turn)
            if not has_room:
                yield self._admission.no_room(request, cost)
                continue
            keeper = self._admission.keeper_of(request)
            request.slot, request.plan = keeper.open(request.query, rows_of(request))
            request.position = request.plan.position
            request.start_clock()
            self._prefilling.append(request)

    def _shed(self) -> Iterator[Up]:
        """Give memory back where answers have outgrown it; the youngest ends where all is given."""
        memory = self._rules.memory
        while memory.over() and not memory.makes_room(self._keeper, 0) and self._decoding:
            if self._engine.release_images(self._begun_images()):
                continue
            request = list(self._decoding.values())[-1]
            log.warning("memory is full: request=%s ends early", request.request_id)
            self.counts["memory_ends"] += 1
            yield from self._finish(request, "length")

    def _can_begin(self, request: Request) -> bool:
        """Whether it waits for nothing but a slot: not for the disk, nor for another's prefill."""
        if self._admission.waits_for_disk(request):
            return False
        return not any(self._is_ahead(leader, request) for leader in self._prefilling)

    def _is_ahead(self, leader: Request, request: Request) -> bool:
        """Whether `leader` is about to prefill what `request` would have to prefill too."""
        if not (leader.is_kept and request.is_kept):
            return False
        shared = request.shared.get(leader.request_id)
        if shared is None:
            theirs = set(leader.query.names)
            mine = zip(request.query.cuts, request.query.names, strict=True)
            shared = max((cut for cut, name in mine if name in theirs), default=0)
            request.shared[leader.request_id] = shared
        return shared > max(leader.position, request.kept_tokens)

    def _prefill(self) -> Iterator[Up]:
        """Feed one chunk of one prompt; start decoding it when it was the last."""
        if not self._prefilling:
            return
        request = self._prefilling[0]
        if not self._is_oldest_next:
            request = min(self._prefilling, key=lambda r: r.left_tokens)
        self._is_oldest_next = not self._is_oldest_next
        if not request.is_prefilled:
            try:
                if not self._look(request):
                    self._feed(request)
            except RequestError as error:  # an image cannot be had any more
                self._prefilling.remove(request)
                yield self._broken(request, error)
                return
            yield Progress(request.request_id, request.position, request.prompt_tokens)
        if request.is_prefilled:
            self._prefilling.remove(request)
            if request.is_prefill:
                yield self._prefilled(request)
                return
            self._decoding[request.request_id] = request
            self._engine.decoder.add(self._sequence(request))

    def _look(self, request: Request) -> bool:
        """Encode the next image that the next forward reads, if one has to be; say whether so.

        A step of its own: it can take long, and who left meanwhile is not prefilled for.
        """
        end = self._forward_end(request)
        for run in request.images_to(end):
            request.seen_to = max(request.seen_to, run.end)
            if self._engine.encode(run.picture, self._begun_images()):
                assert request.clock is not None
                request.clock.chunk()
                return True
        return False

    def _begun_images(self) -> set[ImageName]:
        """Return the images that prefills need yet and had encoded: no other takes their place.

        Else two long ones would be encoded anew for every chunk, in turns.
        """
        return {name for request in self._prefilling for name in request.begun_images()}

    def _forward_end(self, request: Request) -> int:
        """Return where the next forward of a prompt ends."""
        cut = request.query.cuts[request.next_cut()]
        return self._rules.forward_end(request.position, cut)

    def _feed(self, request: Request) -> None:
        """Prefill one chunk; keep what was read at each cut."""
        slot, query = request.slot, request.query
        assert slot is not None
        number, start = request.next_cut(), request.position
        end = self._forward_end(request)
        began = time.monotonic()
        self._engine.prefill(slot.cache, request.ids[start:end], query.images)
        self._pace.fed(end - start, time.monotonic() - began)
        request.position = end
        assert request.clock is not None
        request.clock.chunk()
        tell_prefill(request)
        if end == query.cuts[number]:
            self._admission.keeper_of(request).commit(slot, query.tokens[:end], query.names[number])

    def _prefilled(self, request: Request) -> Finished | Failed:
        """End a request that wants no answer; a pin that is refused leaves its KV as any other."""
        assert request.slot is not None
        try:
            if request.pin_key is not None:
                self._admission.keeper_of(request).pin(
                    request.slot, request.request_id, request.pin_key
                )
        except RequestError as error:
            return self._broken(request, error)
        return self._end(request, "prefilled")

    def _broken(self, request: Request, error: RequestError) -> Failed:
        """End a request by an error; what was prefilled is kept."""
        self._give_back(request)
        return Failed(request.request_id, error.status, error.code, str(error))

    def _sequence(self, request: Request) -> decoder.Sequence:
        slot, keeper = request.slot, self._admission.keeper_of(request)
        assert slot is not None
        return decoder.Sequence(
            key=request.request_id,
            cache=slot.cache,
            tokens=request.ids[: request.position],
            tail=request.ids[request.position :],
            choice=self._choose(request),
            tokens_max=request.tokens_max,
            before_forward=functools.partial(keeper.grow, slot),
            before_join=functools.partial(keeper.lend, slot),
            shift=self._engine.shift(request.query.images, request.position),
        )

    def _decode(self) -> Iterator[Up]:
        if not self._decoding:
            return
        for sampled in self._engine.decoder.step():
            yield from self._take(self._decoding[sampled.key], sampled)

    def _take(self, request: Request, sampled: SampledToken) -> Iterator[Up]:
        """Give one sampled token to its request; end it where that token, or its text, says so."""
        if request.first_token_at is None:
            request.first_token_at = time.monotonic()
        assert request.clock is not None
        request.clock.token()
        request.completion_tokens += 1
        if request.guide is not None and request.guide.failure:
            yield self._failed(request, request.guide.failure)
            return
        if sampled.token_id in self._end_ids:
            request.end_id = sampled.token_id
            yield from self._finish(request, "stop")
            return
        request.sampled.append(sampled.token_id)
        piece = request.output.add(sampled.token_id, self._logprob(request, sampled))
        yield from self._deltas(request, piece)
        if piece.stop is not None:
            yield from self._told(request, "stop", piece.stop)
        elif request.output.is_cut:
            yield from self._told(request, "tool_calls")
        elif request.completion_tokens >= request.tokens_max:
            yield from self._finish(request, "length")

    def _finish(self, request: Request, reason: str) -> Iterator[Up]:
        """End a request after giving what was held back."""
        yield from self._deltas(request, request.output.finish(is_complete=reason == "stop"))
        if reason == "stop" and request.call_ids:
            reason = "tool_calls"
        yield from self._told(request, reason)

    def _told(self, request: Request, reason: str, stop: str | None = None) -> Iterator[Up]:
        """End a request; log probabilities that no text followed go with an empty delta."""
        if request.logprobs:
            yield self._delta(request, AnswerPart("content", ""))
        yield self._end(request, reason, stop)

    def _end(self, request: Request, reason: str, stop: str | None = None) -> Finished:
        self._give_back(request)
        now = time.monotonic()
        began = request.ticket.received_at
        first, clock = request.first_token_at, request.clock
        fed = request.position if first is None else request.prompt_tokens
        plan = request.plan
        if first is not None:
            self._pace.ended(fed - request.cached_tokens, now - first)
        usage = Usage(
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            prefilled_tokens=fed - request.cached_tokens,
            completion_tokens=request.completion_tokens,
            reasoning_tokens=request.output.reasoning_tokens,
            source=request.source,
            image_tokens=request.image_tokens,
            ttft_ms=round(((now if first is None else first) - began) * 1000),
            finish_ms=round((now - began) * 1000),
            queue_ms=round(((now if clock is None else clock.began_at) - began) * 1000),
            match=plan.kind if plan is not None else "none",
        )
        log.info(
            "finished request=%s reason=%s match=%s source=%s prompt=%d cached=%d prefilled=%d "
            "completion=%d ttft_ms=%d ms=%d",
            request.request_id,
            reason,
            usage.match,
            usage.source,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.prefilled_tokens,
            usage.completion_tokens,
            usage.ttft_ms,
            usage.finish_ms,
        )
        return Finished(
            request.request_id, reason, stop, self._rules.ended(request, usage, reason, stop)
        )

    def _failed(self, request: Request, why: str) -> Failed:
        """End a request whose answer can not be held to its constraints any more."""
        self._give_back(request)
        log.error("constraint broke request=%s", request.request_id)  # why quotes the answer
        text = f"The answer could not be held to what was asked of it: {why}."
        return Failed(request.request_id, 500, "constraint_failed", text)

    def _give_back(self, request: Request) -> None:
        """Check the slot in with all that was computed, also for a client that left."""
        slot, request.slot = request.slot, None
        keeper = self._admission.keeper_of(request)
        if self._decoding.pop(request.request_id, None) is not None:
            remains = self._engine.decoder.remove(request.request_id)
            assert slot is not None and remains is not None
            keeper.close(slot, remains.cache, request.keys(remains.tokens), is_prefilled=True)
        elif slot is not None:
            tokens = request.query.tokens[: request.position]
            keeper.close(slot, slot.cache, tokens, is_prefilled=False)

    def _deltas(self, request: Request, piece: OutputPiece) -> Iterator[Up]:
        request.logprobs += piece.logprobs
        for part in piece.parts:
            yield self._delta(request, part)

    def _delta(self, request: Request, part: AnswerPart) -> Delta:
        call = None
        if part.name:
            call = CallStart(request.new_id(), part.name)
            request.call_ids.append(call.id)
        logprobs, request.logprobs = request.logprobs, []
        request.seq += 1
        return Delta(request.request_id, request.seq - 1, part.channel, part.text, logprobs, call)

    def _logprob(self, request: Request, sampled: SampledToken) -> TokenLogprob | None:
        if sampled.logprobs is None:
            return None
        wanted = request.sampling.top_logprobs
        assert wanted is not None, "only asked-for log probabilities are carried"
        return describe(sampled.token_id, sampled.logprobs, wanted, self._vocabulary)
