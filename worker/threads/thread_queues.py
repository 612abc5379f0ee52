"""Defines the queues by which the threads of a worker hand work to each other.

Prompts are sorted by the time that they may take, so that a short prompt never waits for a long
prompt. Each lane is a queue with a thread of its own, which takes the prompts one after the other.
"""

import math
import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from hearth.shared.wire_messages import Count, Prompt, Status, Submit, Up
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.schedule.request_state import (
    ClientLease,
    MessageWithImages,
    RecallDone,
    RenderNextPrompt,
    Request,
)


@dataclass(frozen=True, slots=True)
class InferenceTask:
    """Holds a task that only the inference thread may do; `run` returns the response."""

    run: Callable[[], Up]


# From the wire thread to the image thread. None ends the thread, also in the queues below.
ImageJobs = queue.SimpleQueue[tuple[ClientLease, Submit | Count] | None]

PromptJob = Submit | Count | Status | MessageWithImages | RenderNextPrompt
# To a prompt thread (see `PromptLanes`) from the wire thread, the image thread, and the inference
# thread (RenderNextPrompt).
PromptJobs = queue.SimpleQueue[tuple[ClientLease, PromptJob] | None]

InferenceItem = Request | PrefixQuery | RecallDone | InferenceTask
# To the inference thread from a prompt thread (Request, or for idle time a PrefixQuery of a likely
# next prompt), the disk thread (RecallDone) and the wire thread (InferenceTask).
Inbox = queue.SimpleQueue[InferenceItem]


# Largest weight of each lane. Weights are in characters of text; a thread renders and tokenises
# some 5 million characters a second, so a lane's prompts take 15 ms, 0.4 s, or any time.
LANE_WEIGHTS: Final = (65_536, 2_097_152, math.inf)
VALUE_WEIGHT: Final = 16  # weight of a JSON value besides its text
ID_WEIGHT: Final = 4  # weight of a token
PAIR_WEIGHT: Final = 1 / 4  # weight of a pair of messages: gpt-oss's template compares calls
# Compiling a grammar may take seconds, so no request with a grammar gets into the first lane.
GRAMMAR_WEIGHT: Final = 65_536


class PromptLanes:
    """Holds the queues of the prompt threads, by weight. Any thread."""

    def __init__(self) -> None:
        self.lanes: tuple[PromptJobs, ...] = tuple(queue.SimpleQueue() for _ in LANE_WEIGHTS)

    def put(self, job: tuple[ClientLease, PromptJob] | None) -> None:
        """Queue a job; None ends each thread after the jobs of its queue."""
        if job is None:
            for lane in self.lanes:
                lane.put(None)
        else:
            self.lanes[lane_of(job[1])].put(job)


def lane_of(job: PromptJob) -> int:
    """Return the number of a job's lane. Takes at most 20 ms, whatever the job's size."""
    weight = _weight(job)
    return next(lane for lane, weight_max in enumerate(LANE_WEIGHTS) if weight <= weight_max)


def _weight(job: PromptJob) -> float:
    match job:
        case Status():
            return 0
        case RenderNextPrompt():
            return ID_WEIGHT * len(job.request.ids)
        case MessageWithImages():
            return _weight(job.message)
        case Count():
            return _prompt_weight(job.prompt)
        case Submit():
            constraints = job.constraints
            is_free = constraints.tool_choice == "auto" and not constraints.is_json
            # In bytes, because each byte of the prediction may be a token.
            predicted = len(job.prediction.encode(errors="surrogatepass"))
            return _prompt_weight(job.prompt) + predicted + (0 if is_free else GRAMMAR_WEIGHT)


def _prompt_weight(prompt: Prompt) -> float:
    raw = len(prompt.text or "") + ID_WEIGHT * len(prompt.ids)
    pairs = PAIR_WEIGHT * len(prompt.messages) ** 2
    parts = (prompt.messages, prompt.tools, prompt.deferred, prompt.template_kwargs)
    return raw + pairs + _json_weight(parts)


def _json_weight(values: Iterable[Any]) -> float:
    """Return the weight of nested JSON; counting stops once only the last lane is left."""
    weight = 0
    waiting = list(values)
    while waiting and weight <= LANE_WEIGHTS[-2]:
        value = waiting.pop()
        weight += VALUE_WEIGHT
        if isinstance(value, str):
            weight += len(value)
        elif isinstance(value, dict):
            waiting += value.values()
            weight += sum(map(len, value))
        elif isinstance(value, list):
            waiting += value
    return weight
