"""Makes scripted answers from a list of events, for tests of the dialects."""

import asyncio
from collections.abc import Sequence
from typing import Any

from hearth.proxy.api.multi_choice_stream import AdmittedRequest
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import CallStart, Delta, Finished, TokenLogprob, Usage

Step = Delta | Finished | RequestError | float  # a float is seconds of silence
USAGE = Usage(12, 4, 8, 7, 3, "ram")


class Scripted:
    """Plays `steps` once; deltas that follow one another are not merged."""

    signature = "S1gnature0fThinking000"

    def __init__(self, steps: Sequence[Step], request_id: str = "abc") -> None:
        self.request_id = request_id
        self.prompt_tokens, self.cached_tokens, self.done_tokens = 12, 4, 5
        self.is_closed = False
        self._steps = list(steps)

    async def next_event(self, wait_s: float | None = None) -> Delta | Finished | None:
        step = self._steps[0]
        while isinstance(step, float):
            if wait_s is not None and step > wait_s:
                self._steps[0] = step - wait_s
                await asyncio.sleep(wait_s)
                return None
            await asyncio.sleep(step)
            self._steps.pop(0)
            step = self._steps[0]
        if isinstance(step, RequestError):
            raise step
        self._steps.pop(0)
        return step

    def close(self) -> None:
        self.is_closed = True


def said(text: str, channel: str = "content", logprobs: Sequence[TokenLogprob] = ()) -> Delta:
    return Delta("abc", 0, channel, text, list(logprobs))


def thought(text: str) -> Delta:
    return said(text, "reasoning")


def call(call_id: str, name: str, text: str = "") -> Delta:
    return Delta("abc", 0, "tool_call", text, call=CallStart(call_id, name))


def arguments(text: str) -> Delta:
    return said(text, "tool_call")


def end(reason: str = "stop", usage: Usage = USAGE) -> Finished:
    return Finished("abc", reason, None, usage)


def logprob(text: str, *others: str) -> TokenLogprob:
    top = [[index, other, other.encode(), -1.0 - index] for index, other in enumerate(others)]
    return TokenLogprob(7, text, text.encode(), -0.5, top)


def ticket(request: ParsedRequest, *scripts: Sequence[Step]) -> AdmittedRequest:
    """Return the ticket of `request` whose choices play the scripts."""
    answers: Any = [Scripted(steps) for steps in scripts]
    return AdmittedRequest(request, "m", answers[0], tuple(answers[1:]))


async def listed(iterator: Any) -> list[Any]:
    return [row async for row in iterator]
