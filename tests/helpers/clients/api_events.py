"""Makes answers from given pieces, and the events that a dialect's stream makes of them."""

import asyncio
from collections.abc import Callable
from typing import Any

import orjson

from hearth.proxy.api import server_sent_events as sse
from hearth.proxy.api.answer_frames import FrameWriter, frames
from hearth.proxy.api.multi_choice_stream import AdmittedRequest
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import CallStart, Delta, Finished, Usage

Given = Delta | Finished | RequestError | None
SIGNATURE = "Sig0123456789abcdefXYZ"
KV_CACHE = {
    "cache_hit": True,
    "prefix_length": 8,
    "canonical_length": 0,
    "matched_length": 0,
    "prefilled": 2,
    "source": "ram",
    "match": "none",
    "ttft_ms": 0,
    "idle_tokens": 0,
    "divergence": None,
}
NO_DRAFTS = {
    "accepted_prediction_tokens": 0,
    "rejected_prediction_tokens": 0,
    "decode_forwards": 0,
}
LATE = Finished("r", "stop", None, Usage(10, 8, 2, 3, source="ram"))  # more was kept by its turn


class Scripted:
    """An answer that gives what it was made from; None stands for silence."""

    request_id, prompt_tokens, cached_tokens, done_tokens = "r", 10, 4, 7

    def __init__(self, *events: Given, signature: str = SIGNATURE) -> None:
        self._events = list(events)
        self.signature = signature
        self.waits: list[float | None] = []  # of each question

    async def next_event(self, wait_s: float | None = None) -> Delta | Finished | None:
        self.waits.append(wait_s)
        event = self._events.pop(0)
        if isinstance(event, RequestError):
            raise event
        return event

    def close(self) -> None:
        """Nothing computes it."""


def said(text: str) -> Delta:
    return Delta("r", 0, "content", text)


def thought(text: str) -> Delta:
    return Delta("r", 0, "reasoning", text)


def called(call_id: str, name: str, piece: str = "") -> Delta:
    return Delta("r", 0, "tool_call", piece, call=CallStart(call_id, name))


def more(piece: str) -> Delta:
    """Return the next piece of the arguments of the call that began last."""
    return Delta("r", 0, "tool_call", piece)


def done(reason: str = "stop", stop: str | None = None) -> Finished:
    return Finished("r", reason, stop, Usage(10, 4, 6, 3, 1))


def frames_of(
    request: ParsedRequest,
    writer: Callable[[AdmittedRequest], FrameWriter],
    given: list[Given],
    **more_of: Any,
) -> list[bytes]:
    """Return the frames that `given` becomes."""
    answer: Any = Scripted(*given)
    ticket = AdmittedRequest(request, "m", answer, **more_of)

    async def collect() -> list[bytes]:
        return [frame async for frame in frames(ticket, writer(ticket))]

    return asyncio.run(collect())


def stream(
    request: ParsedRequest,
    writer: Callable[[AdmittedRequest], FrameWriter],
    *given: Given,
    signature: str = SIGNATURE,
) -> list[dict[str, Any]]:
    """Return the events that `given` becomes, each as its data."""
    answer: Any = Scripted(*given, signature=signature)
    ticket = AdmittedRequest(request, "m", answer)

    async def collect() -> list[bytes]:
        return [frame async for frame in frames(ticket, writer(ticket))]

    rows = []
    for frame in asyncio.run(collect()):
        name, data = frame.decode().strip().split("\n")
        rows.append(orjson.loads(data.removeprefix("data: ")))
        assert name == f"event: {rows[-1]['type']}"
    assert set(answer.waits) == {sse.PING_S}, "a silence goes unseen"
    return rows
