"""Makes answers from given pieces, and what a dialect's client is told of them."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from hearth.proxy.api import answer_frames
from hearth.proxy.api.answer_frames import AdmittedRequest, FrameWriter, frames
from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError, WorkerLost
from hearth.shared.wire_messages import CallStart, Delta, Finished, TokenLogprob, Usage

Given = Delta | Finished | RequestError | float | None
SIGNATURE = "Sig0123456789abcdefXYZ"
USAGE = Usage(10, 4, 6, 3, 1)


class Scripted:
    """An answer that gives what it was made from; None stands for silence, so do its seconds."""

    request_id, prompt_tokens, cached_tokens, done_tokens = "r", 10, 4, 7

    def __init__(self, *events: Given, signature: str = SIGNATURE) -> None:
        self._events = list(events)
        self.signature = signature
        self.waits: list[float | None] = []  # of each question
        self.is_closed = False

    async def next_event(self, wait_s: float | None = None) -> Delta | Finished | None:
        self.waits.append(wait_s)
        event = self._events.pop(0)
        if isinstance(event, float):
            slept = event if wait_s is None else min(event, wait_s)
            await asyncio.sleep(slept)
            if slept == event:
                return await self.next_event(wait_s)
            self._events.insert(0, event - slept)
            return None
        if isinstance(event, RequestError):
            raise event
        return event

    def close(self) -> None:
        self.is_closed = True


def said(text: str, *logprobs: TokenLogprob) -> Delta:
    return Delta("r", 0, "content", text, list(logprobs))


def thought(text: str) -> Delta:
    return Delta("r", 0, "reasoning", text)


def called(call_id: str, name: str, piece: str = "") -> Delta:
    return Delta("r", 0, "tool_call", piece, call=CallStart(call_id, name))


def more(piece: str) -> Delta:
    """Return the next piece of the arguments of the call that began last."""
    return Delta("r", 0, "tool_call", piece)


def done(reason: str = "stop", stop: str | None = None, **usage: Any) -> Finished:
    return Finished("r", reason, stop, dataclasses.replace(USAGE, **usage))


def token(text: str, *others: str) -> TokenLogprob:
    """Return a token with its alternatives, each half as likely as the one before; "" is never."""
    top = [
        [n, each or "?", each.encode(), -1.0 - n if each else float("-inf")]
        for n, each in enumerate(others)
    ]
    return TokenLogprob(7, text, text.encode(), -0.5, top)


def given(step: dict[str, Any] | None) -> Given:
    """Return what a step of a table of answers stands for; null is a silence."""
    made: dict[str, Callable[..., Given]] = {
        "said": lambda text, logprobs=(): said(text, *(token(*row) for row in logprobs)),
        "thought": thought,
        "call": lambda pieces: called(*pieces),
        "more": more,
        "end": lambda reason, stop=None, usage=None: done(reason, stop, **(usage or {})),
        "lost": WorkerLost,
    }
    if step is None:
        return None
    (kind, value), *fields = step.items()
    return made[kind](value, **dict(fields))


def frames_of(
    request: ParsedRequest,
    writer: Callable[[AdmittedRequest], FrameWriter],
    rows: Sequence[Given],
    signature: str = SIGNATURE,
    **more_of: Any,
) -> list[bytes]:
    """Return the frames that `rows` become."""
    answer: Any = Scripted(*rows, signature=signature)
    ticket = AdmittedRequest(request, "m", answer, **more_of)

    async def collect() -> list[bytes]:
        return [frame async for frame in frames(ticket, writer(ticket))]

    made = asyncio.run(collect())
    assert set(answer.waits) == {answer_frames.PING_S}, "a silence goes unseen"
    return made


def events_of(request: ParsedRequest, rows: Sequence[Given]) -> list[Any]:
    """Return the events that `rows` become in the request's own dialect, each as its JSON."""
    read: list[Any] = []
    for frame in frames_of(request, DIALECTS[request.dialect].writer, rows):
        *name, data = frame.decode().removesuffix("\n").removesuffix("\n").split("\n")
        data = data.removeprefix("data: ")
        read.append(data if data == "[DONE]" else orjson.loads(data))
        assert name == [] or name == [f"event: {read[-1]['type']}"]
    return read


def whole_of(request: ParsedRequest, rows: Sequence[Given], **more_of: Any) -> Any:
    """Return the whole answer that `rows` become in the request's own dialect, as its JSON."""
    answer: Any = Scripted(*(row for row in rows if row is not None))
    whole = DIALECTS[request.dialect].whole(AdmittedRequest(request, "m", answer, **more_of))

    async def made() -> Any:
        return await whole

    return orjson.loads(orjson.dumps(asyncio.run(made())))
