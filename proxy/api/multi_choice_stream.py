"""Reads the choices of one request, as one stream of events or whole, and adds up their usage."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from hearth.proxy.pool.answer_stream import AnswerStream
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import CallStart, Delta, Finished, TokenLogprob, Usage

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
