"""Advances all requests together: one forward of a prompt, then one decode step, and so on."""

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
    in_queue_order,
    prefills_for,
    record_slot_given,
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
    """Decides what the model computes next. Owner: the inference thread; `load` is for any thread.

    Invariants: a request that has not ended is in exactly one of `_waiting`, `_prefilling` and
    `_decoding`; the latter two have at most `running_max` requests together, each with a slot.

    A request waits, is prefilled from the end of its kept KV on, decodes, and ends in exactly one
    Finished or Failed. Between two forwards of a prefill, every decoding sequence gets its next
    token, and the answers together get nearly as much time as the forward took (`TimeShares`).
    Among several prefills the oldest and the shortest alternate, so that a short prompt does not
    wait for a long prompt, and a long prompt does not wait for ever. If another request is
    prefilling the beginning of a prompt, that prompt waits without a slot and then reuses the KV.
    """

    def __init__(
        self,
        engine: Engine,
        kv_manager: AnyKVManager,
        vocabulary: Vocabulary,
        end_ids: frozenset[int],
        sampling_params: Callable[[Request], SamplingParams],
        config: SchedulerConfig,
    ) -> None:
        self._engine = engine
        self._kv_manager = kv_manager
        self._vocabulary = vocabulary
        self._end_ids = end_ids
        self._sampling_params = sampling_params
        self._config = config
        self._drafts = config.drafts
        self.decoder = engine.decoder
        self.decoder.has_room = self._has_room
        kv_manager.limit_growth(self._has_room)
        kv_manager.set_images(
            EncodedImages(
                lambda: engine.image_bytes(begun_images(self._prefilling)),
                lambda: engine.release_images(begun_images(self._prefilling)),
            )
        )
        # Kept for a moment: waiting requests
        self._waiting: list[Request] = []  # oldest first
        self._prefilling: list[Request] = []  # oldest first
        self._decoding: dict[str, Request] = {}
        self._is_oldest_next = True
        self._slots_given = 0
        self._slots_usable = config.running_max  # lower while memory is short
        self.pace = Pace()  # any thread may read this
        self._idle = IdlePrefill(engine, kv_manager, config)
        self.counts: Counter[str] = Counter()
        self._admission = Admission(kv_manager, self.decoder, config, self.counts)
        self._shares = TimeShares()
        self._has_read_short = False  # whether this step has read a short prompt
        self._prefill_forwards = PrefillForwards(
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

    def report(self, api_key: str = "") -> dict[str, Any]:
        """Return for `/v1/cache` the running answers, and counts of requests that ended early.

        The answers are those of the API key with the digest `api_key` ("" = of all keys); all else
        covers all keys.
        """
        memory, now = self._config.memory, awake_s()
        answers = [
            (request.api_key, answer_row(request, now)) for request in self._decoding.values()
        ]
        return {
            "answers": [row for owner, row in answers if api_key in ("", owner)],
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
        """Return the worker's load; `arriving` further requests are being rendered. Any thread.

        Each list is copied in one step of the interpreter, so no list changes meanwhile.
        """
        running = [*self._prefilling, *self._decoding.values()]
        waiting = list(self._waiting)
        now, slots = awake_s(), self._slots_usable
        wait_s = self.pace.wait_s(
            [request.work(now) for request in running[:slots]],
            [*(request.work(now) for request in waiting), *[Work(None)] * arriving],
            slots,
        )
        queue = [request.request_id for request in in_queue_order(waiting, self._slots_given)]
        return Load(len(running), queue, wait_s)

    def submit(self, request: Request) -> Progress:
        """Queue a request for a slot; return how many prompt tokens have kept KV now.

        Before the request gets a slot, other requests may add KV of the same prompt.
        """
        assert request.slot is None and request.prefill is None, request.request_id
        assert len(request.query.tokens) == request.prompt_tokens, request.request_id
        assert request.query.limit < request.prompt_tokens, request.request_id
        self._config.suspects.record([request])
        self._idle.stop()
        request.queue_order = self._slots_given
        self._waiting.append(request)
        kv_manager = self._admission.kv_manager_of(request)
        request.kept.tokens = kv_manager.plan(request.query).position
        self._admission.start_recall(request)
        self._record_running()
        request.kept.reported_tokens = request.kept.tokens
        return Progress(request.request_id, request.kept.tokens, request.prompt_tokens)

    def take_recalled(self, done: RecallDone) -> None:
        """Take in the KV that the disk thread read; the request stops waiting for the disk."""
        self._admission.take_recalled(done)

    @property
    def is_blocked(self) -> bool:
        """Whether nothing can be computed before a disk read ends or memory becomes free."""
        waits = all(request.kept.recall is not None for request in self._waiting)
        return not self.running and (waits or self._config.relief.holds_back())

    def step(self) -> Iterator[Up]:
        """Do one forward of a prompt if one is due, then one decode step.

        Yield each message to a client as soon as the message is true.
        """
        self.steps += 1
        yield from self._drop_gone()
        yield from self._end_expired()
        yield from self.give_slots()
        self._record_running()
        yield from self._prefill()
        yield from self._free_memory()
        yield from self._decode()
        self._record_running()
        assert self.running <= self._config.running_max, (self.running, self._config.running_max)

    def prefill_idle(self) -> bool:
        """Do one chunk of idle work while there are no requests; return False if none was left."""
        assert self.is_idle, (self.waiting, self.running)
        return self._config.relief.level == Pressure.NORMAL and self._idle.step()

    def prefill_later(self, query: PrefixQuery) -> None:
        """Queue a prompt that is likely to come, to be prefilled in idle time."""
        self._idle.add(query)

    @property
    def idle_tokens(self) -> int:
        """Tokens prefilled in idle time."""
        return self._idle.counts.total()

    def leave_forwards(self) -> None:
        """Clear the record of running requests, because nothing is computed from now on."""
        self._config.suspects.record(())

    def forget(self) -> None:
        """Empty the cache; running requests keep their slots."""
        self._admission.forget()
        self._idle.forget()
        self._drafts.clear()
        self._kv_manager.clear()
        for request in self._waiting:
            request.kept.tokens = 0

    # ------------------------------------------------------------ before the forwards

    def _drop_gone(self) -> Iterator[Up]:
        """End the requests whose client has left."""
        for queue in (self._waiting, self._prefilling):
            for request in [r for r in queue if r.lease.is_gone]:
                queue.remove(request)
                yield self._finished(request, "cancelled")
        for request in [r for r in self._decoding.values() if r.lease.is_gone]:
            yield self._finished(request, "cancelled")

    def _end_expired(self) -> Iterator[Up]:
        """End the requests that exceed a time limit; their prefilled KV is kept.

        Only the oldest prefill is checked: the other prefills may have to wait for shorter prompts.
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
        """Give the free slots to waiting requests in queue order.

        The first request also waits until running requests free enough memory. No other request
        overtakes the first, which might otherwise wait for ever.
        """
        self._slots_usable = self._config.running_max
        while self.running < self._config.running_max:
            running = [*self._prefilling, *self._decoding.values()]
            in_order = filter(self._can_begin, in_queue_order(self._waiting, self._slots_given))
            request = next(in_order, None)
            if request is None or any(other.runs_alone for other in running):
                return
            if running and request.runs_alone:
                return  # a suspect waits for an empty worker, and nothing overtakes a suspect
            if self._config.relief.holds_back():
                yield from self._refuse_late()
                return
            depth = max(request.prompt_tokens, self._prompt_depth)
            has_room, cost = self._admission.makes_room(request, running, depth)
            if self.running and not has_room:
                self._slots_usable = self.running
                return
            if has_room and self._admission.restart_recall(request):
                continue
            self._waiting.remove(request)
            self._slots_given = record_slot_given(request, self._waiting, self._slots_given)
            if not has_room:
                yield self._admission.refuse(request, cost)
                continue
            self._open_slot(request)
            self._config.memory.makes_room(self._kv_manager, 0, depth)  # releases copied KV
            self._prefilling.append(request)
            if request.position < request.kept.reported_tokens:  # a disk read gave less
                yield Progress(request.request_id, request.position, request.prompt_tokens)

    def _has_room(self, nbytes: int) -> bool:
        """Return whether `nbytes` more and the forward of a prompt fit."""
        return not self._config.memory.over(nbytes, self._prompt_depth)

    @property
    def _prompt_depth(self) -> int:
        """Length in tokens of the longest prompt in prefill."""
        return max((request.prompt_tokens for request in self._prefilling), default=0)

    def _refuse_late(self) -> Iterator[Up]:
        """Refuse the requests that waited too long while the system is short of memory."""
        for request in [
            r for r in self._waiting if self._config.relief.has_waited(r.lease.received_at)
        ]:
            self._waiting.remove(request)
            self.counts["pressure_refusals"] += 1
            yield self._config.relief.refusal(request.request_id)

    def _open_slot(self, request: Request) -> None:
        """Open a slot that starts with the kept KV of the request's prompt."""
        assert request.kept.recall is None, request.request_id
        self._record_running(request)
        kv_manager = self._admission.kv_manager_of(request)
        slot, plan = kv_manager.open(request.query, rows_of(request))
        request.begin(slot, plan, self._idle.session_tokens(request.query, slot))

    def _record_running(self, *more: Request) -> None:
        self._config.suspects.record([*self._prefilling, *self._decoding.values(), *more])

    def _free_memory(self) -> Iterator[Up]:
        """Release kept KV if memory is full; if still full, end the youngest answers early."""
        memory, depth = self._config.memory, self._prompt_depth
        while not memory.makes_room(self._kv_manager, 0, depth) and self._decoding:
            request = next(reversed(self._decoding.values()))
            log.warning("memory is full: request=%s ends early", request.request_id)
            self.counts["memory_ends"] += 1
            yield from self._finish(request, "length")

    def _can_begin(self, request: Request) -> bool:
        """Return whether a request waits only for a slot, not for a disk read or a prefill."""
        if self._admission.waits_for_disk(request):
            return False
        return not any(prefills_for(leader, request) for leader in self._prefilling)

    # ------------------------------------------------------------ forwards

    def _next_to_read(self) -> Request | None:
        """Return the request that is prefilled next; None if there is none or a decode step is due.

        A request that is prefilled already needs no forward and goes first.
        """
        prefilled = next((r for r in self._prefilling if r.is_prefilled), None)
        prompts = self._prefilling
        if self._decoding:
            is_short, waits = self._config.is_short, self._shares.is_answers_turn
            prompts = [request for request in prompts if not waits(is_short(request))]
        if prefilled is not None or not prompts:
            return prefilled
        self._is_oldest_next = not self._is_oldest_next
        return min(prompts, key=lambda r: r.left_tokens) if self._is_oldest_next else prompts[0]

    def _prefill(self) -> Iterator[Up]:
        """Do one forward of one prompt; after the prompt's last forward, start decoding."""
        self._has_read_short = False
        request = self._next_to_read()
        if request is None:
            return
        hidden = None
        if not request.is_prefilled:
            try:
                hidden = self._prefill_forwards.step(
                    request, self._prefilling, self._decoding.values()
                )
            except RequestError as error:  # an image is gone
                self._prefilling.remove(request)
                yield self._end_with_error(request, error)
                return
            yield Progress(request.request_id, request.position, request.prompt_tokens)
            self._has_read_short = self._config.is_short(request)
        if request.is_prefilled:
            self._prefilling.remove(request)
            if request.prefill_only is not None:
                yield self._end_prefill_only(request, request.prefill_only.pin_api_key)
                return
            assert request.request_id not in self._decoding, request.request_id
            self._decoding[request.request_id] = request
            self.decoder.add(self._sequence(request, hidden))

    def _sequence(self, request: Request, hidden: Any) -> DecodingSequence:
        """Return the sequence that the decoder continues: the slot's cache and the tokens left.

        This also sets the request's drafter; `hidden` is for a draft model.
        """
        slot, kv_manager = request.slot, self._admission.kv_manager_of(request)
        assert slot is not None and request.is_prefilled, request.request_id
        drafter = self._drafts.begin(request) if can_rewind(slot.cache) else None
        # The first read of `verifies_drafts` runs a trial of the model.
        if drafter is not None and not self._engine.verifies_drafts:
            self._drafts.stop()
            drafter = None
        request.drafter = drafter
        return DecodingSequence(
            request_id=request.request_id,
            cache=slot.cache,
            tokens=request.ids[: request.position],
            tail=request.ids[request.position :],
            sampling=self._sampling_params(request),
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
        """Do one decode step for all decoding requests."""
        if not self._decoding:
            self._shares.clear()
            return
        is_next_short = self._has_read_short and any(map(self._config.is_short, self._prefilling))
        if is_next_short and not self._shares.is_step_due:
            return
        began = self._config.clock()
        for sampled in self.decoder.step():
            request = self._decoding.get(sampled.request_id)
            if request is not None:  # None: an earlier token of the draft ended the request
                yield from self._take_token(request, sampled)
        took_s = self._config.clock() - began
        self._shares.record_decode(took_s)
        if self._prefilling:
            self.pace.record_beside(took_s)

    def _take_token(self, request: Request, sampled: SampledToken) -> Iterator[Up]:
        """Add one sampled token to its request; the token or its text may end the request."""
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
            # The reason quotes the answer, and no log may hold answers.
            log.error("constraint broke request=%s", request.request_id)
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
            assert wanted is not None, "log probabilities came, but the request wants none"
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
        """Send the text that was held back, and end the request."""
        rest = request.output.finish(is_complete=reason == "stop")
        yield from request.deltas.of(rest)
        if rest.stop is not None:
            reason = "stop"
        elif reason == "stop" and request.deltas.call_ids:
            reason = "tool_calls"
        yield from self._end(request, reason, rest.stop)

    def _end(self, request: Request, reason: str, stop: str | None = None) -> Iterator[Up]:
        """End a request whose text has all been sent."""
        yield from request.deltas.last()
        yield self._finished(request, reason, stop)

    def _finished(self, request: Request, reason: str, stop: str | None = None) -> Finished:
        """Close the slot and record the end; return the final message with the usage."""
        self._close_slot(request)
        now = awake_s()
        usage = make_usage(request, now)
        if reason != "cancelled":
            self._config.suspects.drop_answered(request)
        if request.first_token_at is not None:
            self.pace.record_end(usage.prefilled_tokens, now - request.first_token_at)
        usage = self._config.ended(request, usage, reason, stop)
        log_finished(request, reason, usage)
        return Finished(request.request_id, reason, stop, usage)

    def _end_prefill_only(self, request: Request, pin_key: str | None) -> Finished | Failed:
        """End a request that wants no answer; if the pin is refused, the KV is kept unpinned."""
        assert request.slot is not None and not request.completion_tokens, request.request_id
        try:
            if pin_key is not None:
                kv_manager = self._admission.kv_manager_of(request)
                kv_manager.pin(request.slot, request.request_id, pin_key)
        except RequestError as error:
            return self._end_with_error(request, error)
        return self._finished(request, "prefilled")

    def _end_with_error(self, request: Request, error: RequestError) -> Failed:
        """End a request with an error; the prefilled KV is kept."""
        self._close_slot(request)
        return Failed(request.request_id, error.status, error.code, str(error))

    def _close_slot(self, request: Request) -> None:
        """Close the slot and keep its KV, even if the client left."""
        slot, request.slot = request.slot, None
        if request.guide is not None:
            request.guide.close()
        kv_manager = self._admission.kv_manager_of(request)
        if self._decoding.pop(request.request_id, None) is not None:
            trunk = self.decoder.trunks.get(request.request_id)
            if trunk is not None:  # the slot gets a copy of the trunk
                memory, depth = self._config.memory, self._prompt_depth
                memory.makes_room(self._kv_manager, trunk.nbytes, depth)
            rest = self.decoder.remove(request.request_id, request.completion_tokens)
            assert slot is not None and rest is not None, request.request_id
            self._drafts.end(request)
            kv_manager.close(slot, rest.cache, request.keys(rest.tokens), is_prefilled=True)
        elif slot is not None:
            tokens = request.query.tokens[: request.position]
            kv_manager.close(slot, slot.cache, tokens, is_prefilled=False)
