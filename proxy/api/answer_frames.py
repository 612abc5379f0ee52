"""Streams an answer in the frames of its dialect, or collects the whole answer.

One loop serves all dialects: it reads the choices of a request as one stream of events and adds up
their usage. Each dialect has its own `FrameWriter`. The frames and fields that several dialects
share are here too: server-sent events, log probabilities, and the usage fields that Hearth adds.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from hearth.proxy.pool.worker_link import AnswerStream
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import CallStart, Delta, Finished, TokenLogprob, Usage

PING_S: Final = 5.0  # longest silence; for a client that waits 10 s, one ping may be late
LOGPROB_MIN: Final = -9999.0  # stands for minus infinity, which JSON lacks

# (index of the choice, its event); (0, None) = no choice sent anything for a while
ChoiceEvent = tuple[int, Delta | Finished | None]


@dataclass(slots=True)
class AdmittedRequest:
    """A request that a worker has admitted, and its answers. Owner: the request's HTTP task."""

    request: ParsedRequest
    model: str  # public name of the model or adapter that answers
    answer: AnswerStream
    other_answers: tuple[AnswerStream, ...] = ()  # answers of the choices after the first
    # Receives the complete response.
    store_response: Callable[[dict[str, Any]], None] = lambda _: None
    received_at: float = field(default_factory=awake_s)  # the request's arrival, by the awake clock

    @property
    def answers(self) -> tuple[AnswerStream, ...]:
        """Return the answers of all choices, in the order of `ParsedRequest.submissions`."""
        return (self.answer, *self.other_answers)


async def choice_events(
    admitted: AdmittedRequest, wait_s: float | None = None
) -> AsyncGenerator[ChoiceEvent, None]:
    """Yield the events of all choices, each choice up to its Finished.

    After `wait_s` without an event, the generator yields (0, None). When the generator ends, all
    of its tasks have ended. The caller closes the answers.

    Raises:
        RequestError: one choice failed, which ends the other choices too.
    """
    answers = admitted.answers
    if len(answers) == 1:
        event: Delta | Finished | None = None
        while not isinstance(event, Finished):
            event = await admitted.answer.next_event(wait_s)
            yield 0, event
        return
    pending = {
        asyncio.create_task(answer.next_event()): index for index, answer in enumerate(answers)
    }
    try:
        while pending:
            done, _ = await asyncio.wait(
                pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                yield 0, None
            for task in sorted(done, key=pending.__getitem__):
                event, index = task.result(), pending.pop(task)
                if not isinstance(event, Finished):
                    pending[asyncio.create_task(answers[index].next_event())] = index
                if event is not None:
                    yield index, event
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


@dataclass(slots=True)
class WholeChoice:
    """The complete output of one choice: its texts by channel and its calls, in order."""

    parts: list[tuple[str, CallStart | None, list[str]]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished = field(init=False)

    def add(self, event: Delta | Finished) -> None:
        """Add the next event of the choice; an empty text begins no new part."""
        if isinstance(event, Finished):
            self.finished = event
            return
        self.logprobs += event.logprobs
        if event.call is not None or (
            event.text and not (self.parts and self.parts[-1][0] == event.channel)
        ):
            self.parts.append((event.channel, event.call, [event.text]))
        elif event.text:
            self.parts[-1][2].append(event.text)

    def text(self, channel: str) -> str:
        """Return the whole text of `channel`."""
        return "".join(
            text
            for part_channel, _, texts in self.parts
            if part_channel == channel
            for text in texts
        )

    @property
    def calls(self) -> list[tuple[CallStart, str]]:
        """Return each call with the text of its arguments."""
        return [(call, "".join(texts)) for _, call, texts in self.parts if call is not None]


async def whole_choices(admitted: AdmittedRequest) -> tuple[list[WholeChoice], Usage]:
    """Return the choices of `admitted` once all are complete, and their total usage.

    Raises:
        RequestError: one choice failed.
    """
    wholes = [WholeChoice() for _ in admitted.answers]
    async with aclosing(choice_events(admitted)) as events:
        async for index, event in events:
            assert event is not None, "an event is missing, though no silences were requested"
            wholes[index].add(event)
    return wholes, total_usage(
        [choice.finished.usage for choice in wholes], admitted.request.choices
    )


def total_usage(usages: Sequence[Usage], per_prompt: int) -> Usage:
    """Return the total usage of a request; each prompt counts once for all its choices."""
    assert usages and len(usages) % per_prompt == 0, (len(usages), per_prompt)
    firsts = usages[::per_prompt]
    return dataclasses.replace(
        firsts[0],
        prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
        cached_tokens=sum(usage.cached_tokens for usage in firsts),
        source=next((usage.source for usage in firsts if usage.cached_tokens), "none"),
        prefilled_tokens=sum(usage.prefilled_tokens for usage in firsts),
        matched_tokens=sum(usage.matched_tokens for usage in firsts),
        canonical_tokens=sum(usage.canonical_tokens for usage in firsts),
        idle_tokens=max(usage.idle_tokens for usage in firsts),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        image_ms=sum(usage.image_ms for usage in usages),
        accepted_prediction_tokens=sum(usage.accepted_prediction_tokens for usage in usages),
        rejected_prediction_tokens=sum(usage.rejected_prediction_tokens for usage in usages),
        decode_forwards=sum(usage.decode_forwards for usage in usages),
    )


# ---------------------------------------------------------------- frames


class FrameWriter(Protocol):
    """Writes the frames of one stream in its dialect. Owner: the request's HTTP task."""

    def opening_frames(self) -> list[bytes]:
        return []

    def delta_frames(self, index: int, event: Delta) -> list[bytes]: ...

    def final_frames(self, index: int, event: Finished, usage: Usage | None) -> list[bytes]:
        """Return the end of a choice; the last choice to end gets the total `usage`."""
        ...

    def keep_alive_frame(self) -> bytes:
        """Return the frame that keeps a silent stream alive and reports the prefill's progress."""
        ...

    def error_frames(self, error: RequestError) -> list[bytes]:
        """Return the end of a stream that failed."""
        ...


async def frames(admitted: AdmittedRequest, writer: FrameWriter) -> AsyncGenerator[bytes, None]:
    """Yield the frames of the stream of `admitted`; after a failure an error is the last frame.

    A keep-alive frame goes out after PING_S without a frame, also while the model writes text that
    is not sent.
    """
    usages: dict[int, Usage] = {}  # by index of the choices that have ended
    try:
        for frame in writer.opening_frames():
            yield frame
        sent_at = time.monotonic()
        async with aclosing(choice_events(admitted, PING_S)) as events:
            async for index, event in events:
                new_frames: list[bytes] = []
                if isinstance(event, Delta):
                    new_frames = writer.delta_frames(index, event)
                elif event is not None:
                    usages[index], usage = event.usage, None
                    if len(usages) == len(admitted.answers):
                        of_all = [usages[choice] for choice in sorted(usages)]
                        usage = total_usage(of_all, admitted.request.choices)
                    new_frames = writer.final_frames(index, event, usage)
                now = time.monotonic()
                if event is None or (not new_frames and now - sent_at >= PING_S):
                    new_frames = [writer.keep_alive_frame()]
                if new_frames:
                    sent_at = now
                for frame in new_frames:
                    yield frame
    except RequestError as error:
        for answer in admitted.answers:  # before the error, which a client may read late
            answer.close()
        for frame in writer.error_frames(error):
            yield frame


# ---------------------------------------------------------------- shared fields


def extra_fields(usage: Usage) -> dict[str, Any]:
    """Return the fields that Hearth adds to the usage of every dialect."""
    return {
        "kv_cache": {
            "cache_hit": usage.cached_tokens > 0,
            "prefix_length": usage.cached_tokens,
            "canonical_length": usage.canonical_tokens,
            "matched_length": usage.matched_tokens,
            "prefilled": usage.prefilled_tokens,
            "source": usage.source,
            "match": usage.match,
            "ttft_ms": usage.ttft_ms,
            "idle_tokens": usage.idle_tokens,
            **({"image_ms": usage.image_ms} if usage.image_tokens else {}),
            "divergence": usage.divergence,
        },
        "speculation": prediction_fields(usage) | {"decode_forwards": usage.decode_forwards},
        **({"warnings": usage.warnings} if usage.warnings else {}),
    }


def prediction_fields(usage: Usage) -> dict[str, int]:
    """Return how many drafted tokens were accepted and rejected, as chat completions name them."""
    return {
        "accepted_prediction_tokens": usage.accepted_prediction_tokens,
        "rejected_prediction_tokens": usage.rejected_prediction_tokens,
    }


def prefill_fields(answer: AnswerStream) -> dict[str, int]:
    """Return the progress of the prefill, for the keep-alive frames of a stream."""
    return {"done_tokens": answer.done_tokens, "prompt_tokens": answer.prompt_tokens}


def image_fields(usage: Usage) -> dict[str, int]:
    """Return the prompt's image tokens, as both OpenAI dialects name them."""
    return {"image_tokens": usage.image_tokens} if usage.image_tokens else {}


def logprob_entries(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return each token with its log probability and its likeliest alternatives."""
    return [
        _logprob_entry(entry.token, entry.token_bytes, entry.logprob)
        | {
            "top_logprobs": [
                _logprob_entry(text, token_bytes, value)
                for _, text, token_bytes, value in entry.top
            ]
        }
        for entry in logprobs
    ]


def _logprob_entry(text: str, token_bytes: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "bytes": list(token_bytes), "logprob": max(logprob, LOGPROB_MIN)}
