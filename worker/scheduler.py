"""Advances all requests together, one prefill chunk and one decode step at a time."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator

from shared.wire import Admitted, Delta, Finished, Progress, TokenLogprob, Up, Usage
from worker.engine.decode import Sampled, Sequence
from worker.engine.engine import Engine
from worker.engine.sampling import Choice
from worker.request import Request
from worker.stream.detokenise import Vocabulary
from worker.stream.logprobs import describe

log = logging.getLogger(__name__)


class Scheduler:
    """Decides what the model computes next. Owner: the inference thread.

    A request waits, is prefilled, decodes, and ends in exactly one Finished. Between two chunks
    of a prefill every decoding sequence gets its next token. Of several prefills the oldest and
    the shortest take turns, so that a short prompt need not wait for a long one, nor the long
    one for ever.
    """

    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        end_ids: frozenset[int],
        choose: Callable[[Request], Choice],
        slots_max: int,
    ) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._end_ids = end_ids
        self._choose = choose
        self._slots_max = slots_max
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []  # oldest first
        self._decoding: dict[str, Request] = {}
        self._is_oldest_next = True
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

    def submit(self, request: Request) -> Admitted:
        """Take a request; it waits for a slot. Return what its client is told at once."""
        self._waiting.append(request)
        return Admitted(request.request_id, request.prompt_tokens, cached_tokens=0)

    def step(self) -> Iterator[Up]:
        """Do one chunk and one decode step; yield what clients are told, as soon as it holds."""
        self.steps += 1
        yield from self._drop_gone()
        self._give_slots()
        yield from self._prefill()
        yield from self._decode()

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

    def _give_slots(self) -> None:
        while self._waiting and self.running < self._slots_max:
            request = self._waiting.popleft()
            request.cache = self._engine.new_cache()
            self._prefilling.append(request)

    def _prefill(self) -> Iterator[Up]:
        """Feed one chunk of one prompt; start decoding it when it was the last."""
        if not self._prefilling:
            return
        request = self._prefilling[0]
        if not self._is_oldest_next:
            request = min(self._prefilling, key=lambda r: r.left_tokens)
        self._is_oldest_next = not self._is_oldest_next
        assert request.cache is not None
        if not request.is_prefilled:
            chunk = request.next_chunk()
            self._engine.prefill(request.cache, chunk)
            request.position += len(chunk)
            yield Progress(request.request_id, request.position, request.prompt_tokens)
        if request.is_prefilled:
            self._prefilling.remove(request)
            self._decoding[request.request_id] = request
            self._engine.decoder.add(
                Sequence(
                    key=request.request_id,
                    cache=request.cache,
                    tokens=request.ids[:-1],
                    last=request.ids[-1],
                    choice=self._choose(request),
                    tokens_max=request.tokens_max,
                )
            )

    def _decode(self) -> Iterator[Up]:
        if not self._decoding:
            return
        for sampled in self._engine.decoder.step():
            yield from self._take(self._decoding[sampled.key], sampled)

    def _take(self, request: Request, sampled: Sampled) -> Iterator[Up]:
        """Give one sampled token to its request; end it where that token, or its text, says so."""
        if request.first_token_at is None:
            request.first_token_at = time.monotonic()
        request.completion_tokens += 1
        if sampled.token_id in self._end_ids:
            yield from self._finish(request, "stop")
            return
        piece = request.output.add(sampled.token_id, self._logprob(request, sampled))
        if piece.text or piece.logprobs:
            yield self._delta(request, piece.text, piece.logprobs)
        if piece.stop is not None:
            yield self._end(request, "stop", piece.stop)
        elif request.completion_tokens >= request.tokens_max:
            yield from self._finish(request, "length")

    def _finish(self, request: Request, reason: str) -> Iterator[Up]:
        """End a request after giving the text that a stop string might have needed."""
        piece = request.output.finish()
        if piece.text or piece.logprobs:
            yield self._delta(request, piece.text, piece.logprobs)
        yield self._end(request, reason)

    def _end(self, request: Request, reason: str, stop: str | None = None) -> Finished:
        if self._decoding.pop(request.request_id, None) is not None:
            self._engine.decoder.remove(request.request_id)
        request.cache = None
        now = time.monotonic()
        began = request.ticket.received_at
        first = request.first_token_at
        usage = Usage(
            prompt_tokens=request.prompt_tokens,
            cached_tokens=0,
            prefilled_tokens=request.position + (first is not None),
            completion_tokens=request.completion_tokens,
            ttft_ms=round(((now if first is None else first) - began) * 1000),
            finish_ms=round((now - began) * 1000),
        )
        log.info(
            "finished request=%s reason=%s prompt=%d prefilled=%d completion=%d ttft_ms=%d ms=%d",
            request.request_id,
            reason,
            usage.prompt_tokens,
            usage.prefilled_tokens,
            usage.completion_tokens,
            usage.ttft_ms,
            usage.finish_ms,
        )
        return Finished(request.request_id, reason, stop, usage)

    def _delta(self, request: Request, text: str, logprobs: list[TokenLogprob]) -> Delta:
        request.seq += 1
        return Delta(request.request_id, request.seq - 1, "content", text, logprobs)

    def _logprob(self, request: Request, sampled: Sampled) -> TokenLogprob | None:
        if sampled.logprobs is None:
            return None
        wanted = request.sampling.top_logprobs
        assert wanted is not None, "only asked-for log probabilities are carried"
        return describe(sampled.token_id, sampled.logprobs, wanted, self._vocabulary)
