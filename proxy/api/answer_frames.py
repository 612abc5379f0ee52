"""Streams an answer in its dialect's frames, or gathers it whole: one loop for all dialects.

It reads the choices of one request as one stream of events, and adds up their usage; each dialect
has its writer of frames. Below are the frames and fields that several dialects share: server-sent
events, log probabilities, and usage beyond each API's own.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import orjson

from hearth.proxy.pool.worker_link import AnswerStream
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import CallStart, Delta, Finished, TokenLogprob, Usage

PING_S: Final = 5.0  # of silence: a client that counts 10 s sees one late event in between
SSE_DONE: Final = b"data: [DONE]\n\n"  # the end of OpenAI's streams
LOGPROB_MIN: Final = -9999.0  # JSON has no infinity

# (choice, what it gave); (0, None) = all were silent
ChoiceEvent = tuple[int, Delta | Finished | None]


@dataclass(slots=True)
class AdmittedRequest:
    """A request that a worker has admitted, and its answer. Owner: its HTTP task."""

    request: ParsedRequest
    model: str  # the public name of what answers
    answer: AnswerStream
    others: tuple[AnswerStream, ...] = ()  # the choices after the first
    note_end: Callable[[dict[str, Any]], None] = lambda _: None  # is given a response that is whole
    came_at: float = field(default_factory=awake_s)  # when it was asked

    @property
    def answers(self) -> tuple[AnswerStream, ...]:
        """Every choice, in the order of `ParsedRequest.submissions`."""
        return (self.answer, *self.others)


async def choice_events(
    admitted: AdmittedRequest, wait_s: float | None = None
) -> AsyncGenerator[ChoiceEvent, None]:
    """Yield what the choices give, each until its Finished; a silence when `wait_s` passed.

    Once it has ended no task of it runs on. Who admitted the answers closes them.

    Raises:
        RequestError: one of them failed; this is the end of all.
    """
    answers = admitted.answers
    if len(answers) == 1:
        row: Delta | Finished | None = None
        while not isinstance(row, Finished):
            row = await admitted.answer.next_event(wait_s)
            yield 0, row
        return
    pending = {asyncio.create_task(each.next_event()): at for at, each in enumerate(answers)}
    try:
        while pending:
            done, _ = await asyncio.wait(
                pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                yield 0, None
            for task in sorted(done, key=pending.__getitem__):
                row, index = task.result(), pending.pop(task)
                if not isinstance(row, Finished):
                    pending[asyncio.create_task(answers[index].next_event())] = index
                if row is not None:
                    yield index, row
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)  # nothing is left running


@dataclass(slots=True)
class WholeChoice:
    """What one choice said from its begin to its end: each run of a channel, each call."""

    parts: list[tuple[str, CallStart | None, list[str]]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Finished = field(init=False)

    def take(self, row: Delta | Finished) -> None:
        """Add what comes next; a channel that says nothing begins no run."""
        if isinstance(row, Finished):
            self.end = row
            return
        self.logprobs += row.logprobs
        if row.call is not None or (
            row.text and not (self.parts and self.parts[-1][0] == row.channel)
        ):
            self.parts.append((row.channel, row.call, [row.text]))
        elif row.text:
            self.parts[-1][2].append(row.text)

    def text(self, channel: str) -> str:
        """Return all that was said in `channel`."""
        return "".join(text for kind, _, texts in self.parts if kind == channel for text in texts)

    @property
    def calls(self) -> list[tuple[CallStart, str]]:
        """Each call, and the text of its arguments."""
        return [(call, "".join(texts)) for _, call, texts in self.parts if call is not None]


async def whole_choices(admitted: AdmittedRequest) -> tuple[list[WholeChoice], Usage]:
    """Return the choices of `admitted` once all are complete, and what they cost together.

    Raises:
        RequestError: one broke off.
    """
    wholes = [WholeChoice() for _ in admitted.answers]
    async with aclosing(choice_events(admitted)) as events:
        async for index, row in events:
            assert row is not None, "nobody asked for silences"
            wholes[index].take(row)
    return wholes, merged([each.end.usage for each in wholes], admitted.request.choices)


def merged(usages: Sequence[Usage], per_prompt: int) -> Usage:
    """Return what the choices of a request cost together: a prompt counts once for its own."""
    assert usages and len(usages) % per_prompt == 0, (len(usages), per_prompt)
    firsts = usages[::per_prompt]
    return dataclasses.replace(
        firsts[0],
        prompt_tokens=sum(row.prompt_tokens for row in firsts),
        cached_tokens=sum(row.cached_tokens for row in firsts),
        source=next((row.source for row in firsts if row.cached_tokens), "none"),
        prefilled_tokens=sum(row.prefilled_tokens for row in firsts),
        matched_tokens=sum(row.matched_tokens for row in firsts),
        canonical_tokens=sum(row.canonical_tokens for row in firsts),
        idle_tokens=max(row.idle_tokens for row in firsts),
        completion_tokens=sum(row.completion_tokens for row in usages),
        reasoning_tokens=sum(row.reasoning_tokens for row in usages),
        image_ms=sum(row.image_ms for row in usages),
        accepted_prediction_tokens=sum(row.accepted_prediction_tokens for row in usages),
        rejected_prediction_tokens=sum(row.rejected_prediction_tokens for row in usages),
        decode_forwards=sum(row.decode_forwards for row in usages),
    )


# ---------------------------------------------------------------- frames


def sse_event(kind: str, data: dict[str, Any]) -> bytes:
    """Return one named event, its type repeated in the data as the official APIs do."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **data}) + b"\n\n"


def sse_data(row: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(row) + b"\n\n"


class FrameWriter(Protocol):
    """Writes the frames of one stream, in the words of its dialect. Owner: its HTTP task."""

    def begun(self) -> list[bytes]:
        return []

    def grown(self, index: int, row: Delta) -> list[bytes]: ...

    def ended(self, index: int, row: Finished, usage: Usage | None) -> list[bytes]:
        """Return the end of a choice; `usage` is of all, where this is the last of them."""
        ...

    def alive(self) -> bytes:
        """Return the frame that keeps a silent stream alive; it tells how far the prefill is."""
        ...

    def broken(self, error: RequestError) -> list[bytes]:
        """Return the end of a stream that breaks off."""
        ...


async def frames(admitted: AdmittedRequest, writer: FrameWriter) -> AsyncGenerator[bytes, None]:
    """Yield the stream of `admitted`; where it breaks off, an error is its end.

    A stream that would fall silent, also where its model writes what is not told, says that it is
    alive.
    """
    usages: dict[int, Usage] = {}  # by choice, once it has ended
    try:
        for frame in writer.begun():
            yield frame
        sent_at = time.monotonic()
        async with aclosing(choice_events(admitted, PING_S)) as events:
            async for index, row in events:
                found: list[bytes] = []
                if isinstance(row, Delta):
                    found = writer.grown(index, row)
                elif row is not None:
                    usages[index], usage = row.usage, None
                    if len(usages) == len(admitted.answers):
                        of_all = [usages[each] for each in sorted(usages)]
                        usage = merged(of_all, admitted.request.choices)
                    found = writer.ended(index, row, usage)
                now = time.monotonic()
                if row is None or (not found and now - sent_at >= PING_S):
                    found = [writer.alive()]
                if found:
                    sent_at = now
                for frame in found:
                    yield frame
    except RequestError as error:
        for answer in admitted.answers:  # the others compute for nobody, also where he reads late
            answer.close()
        for frame in writer.broken(error):
            yield frame


# ---------------------------------------------------------------- shared fields


def extra_fields(usage: Usage) -> dict[str, Any]:
    """Return the fields of ours that the usage of every dialect has."""
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
    """Return what came of drafted tokens, in the words of chat completions."""
    return {
        "accepted_prediction_tokens": usage.accepted_prediction_tokens,
        "rejected_prediction_tokens": usage.rejected_prediction_tokens,
    }


def prefill_fields(answer: AnswerStream) -> dict[str, int]:
    """Return how far the prefill is, for a stream that is silent meanwhile."""
    return {"done_tokens": answer.done_tokens, "prompt_tokens": answer.prompt_tokens}


def image_fields(usage: Usage) -> dict[str, int]:
    """Return what of the prompt stands for images, in the words of both OpenAI dialects."""
    return {"image_tokens": usage.image_tokens} if usage.image_tokens else {}


def logprob_rows(rows: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return each token with its log probability, and those of its alternatives."""
    return [
        _row(each.token, each.token_bytes, each.logprob)
        | {"top_logprobs": [_row(text, octets, value) for _, text, octets, value in each.top]}
        for each in rows
    ]


def _row(text: str, octets: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "bytes": list(octets), "logprob": max(logprob, LOGPROB_MIN)}
