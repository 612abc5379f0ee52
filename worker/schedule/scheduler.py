"""Advances all requests together, one forward of a prompt and one decode step at a time."""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Failed, Finished, Progress, Up
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.engine.decode.decoder import SampledToken
from hearth.worker.engine.decode.decoding_sequence import DecodingSequence
from hearth.worker.engine.decode.sampler import SamplingParams
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.system_state import Pressure
from hearth.worker.kv.layer_adapters import RewindPoint, can_rewind
from hearth.worker.kv.memory_release import EncodedImages
from hearth.worker.schedule.admission_and_disk_recall import (
    Admission,
    give_turn,
    in_turn,
    prefills_for,
    rows_of,
)
from hearth.worker.schedule.memory_guard import AnyKVManager
from hearth.worker.schedule.prefill_forwards import (
    IdlePrefill,
    PrefillForwards,
    TimeShares,
    begun_images,
)
from hearth.worker.schedule.request_ending import answer_row, log_finished, make_usage
from hearth.worker.schedule.request_state import RecallDone, Request
from hearth.worker.schedule.scheduler_config import SchedulerConfig
from hearth.worker.schedule.wait_estimate import Load, Pace, Work
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.stream.logprobs import describe

log = logging.getLogger(__name__)


class Scheduler:
    """Decides what the model computes next. Owner: the inference thread; `load` is any thread's.

    Invariants: a request is in exactly one of `_waiting`, `_prefilling`, `_decoding`, or it has
    ended; it holds a slot in the latter two, of which there are `running_max` at most.

    A request waits, is prefilled from where the kept KV ends, decodes, and ends in exactly one
    Finished. Between two forwards of a prefill every decoding sequence gets its next token, and
    all of them together nearly as much time as the forward took (`TimeShares`). Of several
    prefills the oldest and the shortest take turns, so that a short prompt need not wait for a long
    one, nor the long one for ever. A request whose beginning another is prefilling waits for that
    one, without a slot, and takes over where it ends.
    """

    def __init__(
        self,
        engine: Engine,
        kv_manager: AnyKVManager,
        vocabulary: Vocabulary,
        end_ids: frozenset[int],
        choose: Callable[[Request], SamplingParams],
        config: SchedulerConfig,
    ) -> None:
        self._engine = engine
        self._kv_manager = kv_manager
        self._vocabulary = vocabulary
        self._end_ids = end_ids
        self._choose = choose
        self._config = config
        self._drafts = config.drafts
        self.decoder = engine.decoder
        self.decoder.has_room = self._has_room
        kv_manager.limit_growth(self._has_room)
        kv_manager.release_too(
            EncodedImages(
                lambda: engine.image_bytes(begun_images(self._prefilling)),
                lambda: engine.release_images(begun_images(self._prefilling)),
            )
        )
        # Kept for a moment: requests that wait
        self._waiting: list[Request] = []  # oldest first
        self._prefilling: list[Request] = []  # oldest first
        self._decoding: dict[str, Request] = {}
        self._is_oldest_next = True
        self._turn = 0  # slots that were given
        self._places = config.running_max  # for requests that compute, as far as memory goes
        self.pace = Pace()  # others may read
        self._idle = IdlePrefill(engine, kv_manager, config)
        self.counts: Counter[str] = Counter()
        self._admission = Admission(kv_manager, self.decoder, config, self.counts)
        self._shares = TimeShares()
        self._has_read_short = False  # in this step
        self._reader = PrefillForwards(
            engine, config, self._admission.kv_manager_of, self.pace, self._shares
        )
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

    def report(self, key: str = "") -> dict[str, Any]:
        """Return for `/v1/cache` the answers that are written now, and what ended others early.

        The answers are of the API key with this digest, "" = everyone's; the rest is of all.
        """
        memory, now = self._config.memory, awake_s()
        answers = [(each.api_key, answer_row(each, now)) for each in self._decoding.values()]
        return {
            "answers": [row for owner, row in answers if key in ("", owner)],
            "answers_running": len(answers),
            "answers_tokens_per_s": round(sum(row["tokens_per_s"] or 0 for _, row in answers), 1),
            "ends": dict(self.counts),
            "running_max": self._config.running_max,
            "idle": self._idle.report(),
            "memory_bytes": memory.used(),
            "memory_limit_bytes": memory.limit(),
            "pressure": self._config.relief.report(),
            "speculation": self._drafts.report(),
        }

    def load(self, arriving: int) -> Load:
        """Return what there is to do, with `arriving` requests that are being rendered. Any thread.

        Each copy is made in one step of the interpreter: the owner changes nothing meanwhile.
        """
        running = [*self._prefilling, *self._decoding.values()]
        waiting = list(self._waiting)
        now, places = awake_s(), self._places
        wait_s = self.pace.wait_s(
            [request.work(now) for request in running[:places]],
            [*(request.work(now) for request in waiting), *[Work(None)] * arriving],
            places,
        )
        queue = [request.request_id for request in in_turn(waiting, self._turn)]
        return Load(len(running), queue, wait_s)

    def submit(self, request: Request) -> Progress:
        """Take a request; it waits for a slot. Return how much of it is kept now.

        Others may add to that before the request has a slot.
        """
        assert request.slot is None and request.prefill is None, request.request_id
        assert len(request.query.tokens) == request.prompt_tokens, request.request_id
        assert request.query.limit < request.prompt_tokens, request.request_id
        self._config.suspects.note([request])
        self._idle.stop()
        request.turn = self._turn
        self._waiting.append(request)
        kv_manager = self._admission.kv_manager_of(request)
        request.kept.tokens = kv_manager.plan(request.query).position
        self._admission.ask_disk(request)
        self._note_running()
        request.kept.reported_tokens = request.kept.tokens
        return Progress(request.request_id, request.kept.tokens, request.prompt_tokens)

    def take_recalled(self, done: RecallDone) -> None:
        """Take in what was read from disk; the request it was read for may have a slot now."""
        self._admission.take_recalled(done)

    @property
    def is_blocked(self) -> bool:
        """Whether nothing can be computed before the disk has answered, or memory is to be had."""
        waits = all(request.kept.recall is not None for request in self._waiting)
        return not self.running and (waits or self._config.relief.holds_back())

    def step(self) -> Iterator[Up]:
        """Do one decode step, and a forward of a prompt before it where that has its turn.

        Yields what clients are sent, as soon as it holds.
        """
        self.steps += 1
        yield from self._drop_gone()
        yield from self._end_expired()
        yield from self.give_slots()
        self._note_running()
        yield from self._prefill()
        yield from self._free_memory()
        yield from self._decode()
        self._note_running()
        assert self.running <= self._config.running_max, (self.running, self._config.running_max)

    def prefill_idle(self) -> bool:
        """With nothing else to do, do one chunk of idle work; say whether there was any."""
        assert self.is_idle, (self.waiting, self.running)
        return self._config.relief.level == Pressure.NORMAL and self._idle.step()

    def prefill_later(self, query: PrefixQuery) -> None:
        """Prefill `query` when there is nothing else to do: a prompt that will be asked."""
        self._idle.add(query)

    @property
    def idle_tokens(self) -> int:
        """Tokens prefilled in idle time, for no request."""
        return self._idle.counts.total()

    def leave_forwards(self) -> None:
        """Nothing is computed any more: what ends the process now is nobody's forward."""
        self._config.suspects.note(())

    def forget(self) -> None:
        """Empty the cache; running requests go on with what they have."""
        self._admission.forget()
        self._idle.forget()
        self._drafts.clear()
        self._kv_manager.clear()
        for request in self._waiting:
            request.kept.tokens = 0

    # ------------------------------------------------------------ before the forwards

    def _drop_gone(self) -> Iterator[Up]:
        """End the requests whose client left or whose lease ran out."""
        for queue in (self._waiting, self._prefilling):
            for request in [r for r in queue if r.lease.is_gone]:
                queue.remove(request)
                yield self._finished(request, "cancelled")
        for request in [r for r in self._decoding.values() if r.lease.is_gone]:
            yield self._finished(request, "cancelled")

    def _end_expired(self) -> Iterator[Up]:
        """End what has had its time; the prefill that was done is kept, its slot is free.

        Of the prompts only the oldest has a turn of its own: the others may be overtaken.
        """
        for request in [*self._prefilling[:1], *self._decoding.values()]:
            why = self._config.watchdog.verdict(request, self.pace.chunk_s)
            if why is None or request.times is None:
                continue
            log.warning("watchdog ends request=%s: %s", request.request_id, why)
            self.counts["watchdog_ends"] += 1
            request.times.is_expired = True
            if request.request_id not in self._decoding:
                self._prefilling.remove(request)
            yield from self._finish(request, "length")

    def give_slots(self) -> Iterator[Up]:
        """Give each free slot to whoever's turn it is.

        For memory too the first in turn waits, until those that run give it back: were it
        overtaken, it might wait for ever.
        """
        self._places = self._config.running_max
        while self.running < self._config.running_max:
            running = [*self._prefilling, *self._decoding.values()]
            in_order = filter(self._can_begin, in_turn(self._waiting, self._turn))
            request = next(in_order, None)
            if request is None or any(each.runs_alone for each in running):
                return
            if running and request.runs_alone:
                return  # a suspect: whoever else waits may not begin before it
            if self._config.relief.holds_back():
                yield from self._refuse_late()
                return
            depth = max(request.prompt_tokens, self._prompt_depth)
            has_room, cost = self._admission.makes_room(request, running, depth)
            if self.running and not has_room:
                self._places = self.running
                return
            if has_room and self._admission.asks_again(request):
                continue
            self._waiting.remove(request)
            self._turn = give_turn(request, self._waiting, self._turn)
            if not has_room:
                yield self._admission.no_room(request, cost)
                continue
            self._open_slot(request)
            self._config.memory.makes_room(self._kv_manager, 0, depth)  # its copies go
            self._prefilling.append(request)
            if request.position < request.kept.reported_tokens:  # the disk had not what it promised
                yield Progress(request.request_id, request.position, request.prompt_tokens)

    def _has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more may be held, beside the forward of a prompt."""
        return not self._config.memory.over(nbytes, self._prompt_depth)

    @property
    def _prompt_depth(self) -> int:
        """The length in tokens of the longest prompt that is being read."""
        return max((request.prompt_tokens for request in self._prefilling), default=0)

    def _refuse_late(self) -> Iterator[Up]:
        """Refuse what has waited too long for a system that is short of memory."""
        for request in [
            r for r in self._waiting if self._config.relief.has_waited(r.lease.received_at)
        ]:
            self._waiting.remove(request)
            self.counts["pressure_refusals"] += 1
            yield self._config.relief.refusal(request.request_id)

    def _open_slot(self, request: Request) -> None:
        """Check a slot out for a request, which goes on from what the slot holds of its prompt."""
        assert request.kept.recall is None, request.request_id
        self._note_running(request)
        kv_manager = self._admission.kv_manager_of(request)
        slot, plan = kv_manager.open(request.query, rows_of(request))
        request.begin(slot, plan, self._idle.session_tokens(request.query, slot))

    def _note_running(self, *more: Request) -> None:
        self._config.suspects.note([*self._prefilling, *self._decoding.values(), *more])

    def _free_memory(self) -> Iterator[Up]:
        """Give memory back where answers have outgrown it; the youngest ends where all is given."""
        memory, depth = self._config.memory, self._prompt_depth
        while not memory.makes_room(self._kv_manager, 0, depth) and self._decoding:
            request = next(reversed(self._decoding.values()))
            log.warning("memory is full: request=%s ends early", request.request_id)
            self.counts["memory_ends"] += 1
            yield from self._finish(request, "length")

    def _can_begin(self, request: Request) -> bool:
        """Whether it waits for nothing but a slot: not for the disk, nor for another's prefill."""
        if self._admission.waits_for_disk(request):
            return False
        return not any(prefills_for(leader, request) for leader in self._prefilling)

    # ------------------------------------------------------------ forwards

    def _next_to_read(self) -> Request | None:
        """Return whose prompt has its turn now; None where it is the answers', or there is none.

        Who is read already needs no forward, and waits for nobody's.
        """
        is_read = next((r for r in self._prefilling if r.is_prefilled), None)
        prompts = self._prefilling
        if self._decoding:
            is_short, waits = self._config.is_short, self._shares.is_answers_turn
            prompts = [each for each in prompts if not waits(is_short(each))]
        if is_read is not None or not prompts:
            return is_read
        self._is_oldest_next = not self._is_oldest_next
        return min(prompts, key=lambda r: r.left_tokens) if self._is_oldest_next else prompts[0]

    def _prefill(self) -> Iterator[Up]:
        """Do one forward of one prompt; start decoding it when it was the last."""
        self._has_read_short = False
        request = self._next_to_read()
        if request is None:
            return
        hidden = None
        if not request.is_prefilled:
            try:
                hidden = self._reader.step(request, self._prefilling, self._decoding.values())
            except RequestError as error:  # an image cannot be had any more
                self._prefilling.remove(request)
                yield self._end_with_error(request, error)
                return
            yield Progress(request.request_id, request.position, request.prompt_tokens)
            self._has_read_short = self._config.is_short(request)
        if request.is_prefilled:
            self._prefilling.remove(request)
            if request.prefill_only is not None:
                yield self._end_prefill_only(request, request.prefill_only.pin_key)
                return
            assert request.request_id not in self._decoding, request.request_id
            self._decoding[request.request_id] = request
            self.decoder.add(self._sequence(request, hidden))

    def _sequence(self, request: Request, hidden: Any) -> DecodingSequence:
        """Return what the decoder goes on from: the slot's cache, and what is not in it yet.

        The request is drafted for from here on, if it is at all; `hidden` is for a draft model.
        """
        slot, kv_manager = request.slot, self._admission.kv_manager_of(request)
        assert slot is not None and request.is_prefilled, request.request_id
        drafter = self._drafts.begin(request) if can_rewind(slot.cache) else None
        # The model is tried once there is something to verify.
        if drafter is not None and not self._engine.verifies_drafts:
            self._drafts.stop()
            drafter = None
        request.drafter = drafter
        return DecodingSequence(
            request_id=request.request_id,
            cache=slot.cache,
            tokens=request.ids[: request.position],
            tail=request.ids[request.position :],
            sampling=self._choose(request),
            tokens_max=request.tokens_max,
            before_forward=functools.partial(kv_manager.grow, slot),
            before_join=functools.partial(kv_manager.lend, slot),
            join_bytes=functools.partial(kv_manager.lend_bytes, slot),
            take_back=functools.partial(kv_manager.take_back, slot),
            shift=self._engine.shift(request.query.images, request.position),
            lineage=request.lineage,
            adapter=self._engine.adapters.of(request.query.adapter),
            drafter=drafter,
            before_draft=functools.partial(kv_manager.grow_for_draft, slot),
            rewind_point=RewindPoint,
            draft_model=drafter.model if drafter is not None else None,
            hidden=hidden,
        )

    def _decode(self) -> Iterator[Up]:
        """Do one decode step for all that decode."""
        if not self._decoding:
            self._shares.clear()
            return
        is_next_short = self._has_read_short and any(map(self._config.is_short, self._prefilling))
        if is_next_short and not self._shares.is_step_due:
            return
        began = self._config.clock()
        for sampled in self.decoder.step():
            request = self._decoding.get(sampled.request_id)
            if request is not None:  # else it has ended within its draft
                yield from self._take_token(request, sampled)
        took_s = self._config.clock() - began
        self._shares.note_decode(took_s)
        if self._prefilling:
            self.pace.note_beside(took_s)

    def _take_token(self, request: Request, sampled: SampledToken) -> Iterator[Up]:
        """Give one sampled token to its request; end it where that token, or its text, says so."""
        assert request.times is not None, request.request_id
        request.times.progressed_at = awake_s()
        if request.times.first_token_at is None:
            request.times.first_token_at = request.times.progressed_at
        if sampled.token_id in self._end_ids:
            request.end_id = sampled.token_id
        else:
            request.sampled.append(sampled.token_id)
        if request.guide is not None and request.guide.failure:
            self._close_slot(request)
            log.error("constraint broke request=%s", request.request_id)  # why quotes the answer
            text = f"The answer could not be held to what was asked of it: {request.guide.failure}."
            status = request.guide.failure_status
            yield Failed(request.request_id, status, "constraint_failed", text)
            return
        if request.end_id is not None:
            yield from self._finish(request, "stop")
            return
        logprob = None
        if sampled.logprobs is not None:
            wanted = request.sampling.top_logprobs
            assert wanted is not None, "only asked-for log probabilities are carried"
            logprob = describe(sampled.token_id, sampled.logprobs, wanted, self._vocabulary)
        piece = request.output.add(sampled.token_id, logprob)
        yield from request.deltas.of(piece)
        if piece.stop is not None:
            yield from self._end(request, "stop", piece.stop)
        elif request.output.is_cut:
            yield from self._end(request, "tool_calls")
        elif request.completion_tokens >= request.tokens_max:
            yield from self._finish(request, "length")

    # ------------------------------------------------------------ ends

    def _finish(self, request: Request, reason: str) -> Iterator[Up]:
        """End a request after giving what was held back."""
        rest = request.output.finish(is_complete=reason == "stop")
        yield from request.deltas.of(rest)
        if rest.stop is not None:
            reason = "stop"
        elif reason == "stop" and request.deltas.call_ids:
            reason = "tool_calls"
        yield from self._end(request, reason, rest.stop)

    def _end(self, request: Request, reason: str, stop: str | None = None) -> Iterator[Up]:
        """End a request whose text has all been given."""
        yield from request.deltas.last()
        yield self._finished(request, reason, stop)

    def _finished(self, request: Request, reason: str, stop: str | None = None) -> Finished:
        """Check the slot in; return what the request cost."""
        self._close_slot(request)
        now = awake_s()
        usage = make_usage(request, now)
        if reason != "cancelled":
            self._config.suspects.served(request)
        if request.first_token_at is not None:
            self.pace.note_end(usage.prefilled_tokens, now - request.first_token_at)
        usage = self._config.ended(request, usage, reason, stop)
        log_finished(request, reason, usage)
        return Finished(request.request_id, reason, stop, usage)

    def _end_prefill_only(self, request: Request, pin_key: str | None) -> Finished | Failed:
        """End a request that wants no answer; a pin that is refused leaves its KV as any other."""
        assert request.slot is not None and not request.completion_tokens, request.request_id
        try:
            if pin_key is not None:
                kv_manager = self._admission.kv_manager_of(request)
                kv_manager.pin(request.slot, request.request_id, pin_key)
        except RequestError as error:
            return self._end_with_error(request, error)
        return self._finished(request, "prefilled")

    def _end_with_error(self, request: Request, error: RequestError) -> Failed:
        """End a request by an error; what was prefilled is kept."""
        self._close_slot(request)
        return Failed(request.request_id, error.status, error.code, str(error))

    def _close_slot(self, request: Request) -> None:
        """Check the slot in with all that was computed, also for a client that left."""
        slot, request.slot = request.slot, None
        if request.guide is not None:
            request.guide.close()
        kv_manager = self._admission.kv_manager_of(request)
        if self._decoding.pop(request.request_id, None) is not None:
            trunk = self.decoder.trunks.get(request.request_id)
            if trunk is not None:  # the slot gets a copy of it
                memory, depth = self._config.memory, self._prompt_depth
                memory.makes_room(self._kv_manager, trunk.nbytes, depth)
            rest = self.decoder.remove(request.request_id, request.completion_tokens)
            assert slot is not None and rest is not None, request.request_id
            self._drafts.end(request)
            kv_manager.close(slot, rest.cache, request.keys(rest.tokens), is_prefilled=True)
        elif slot is not None:
            tokens = request.query.tokens[: request.position]
            kv_manager.close(slot, slot.cache, tokens, is_prefilled=False)
