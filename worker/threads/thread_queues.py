"""Defines the queues by which the threads of a worker hand work to each other.

Prompts are sorted by the time that they may take, so that a short one never waits for a long one:
each lane is a queue with a thread of its own, and its prompts are taken one after the other.
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
    """Something about the cache that only the inference thread may do; `run` returns its answer."""

    run: Callable[[], Up]


# From the wire thread, for messages that show images. None ends a thread, here and below.
ImageJobs = queue.SimpleQueue[tuple[ClientLease, Submit | Count] | None]

PromptJob = Submit | Count | Status | MessageWithImages | RenderNextPrompt
# One of the prompt threads' (`PromptLanes`). From the wire thread, the image thread, and the
# inference thread (RenderNextPrompt).
PromptJobs = queue.SimpleQueue[tuple[ClientLease, PromptJob] | None]

InferenceItem = Request | PrefixQuery | RecallDone | InferenceTask
# From a prompt thread (a PrefixQuery is a prompt that is likely to come: it is prefilled in idle
# time), the disk thread (RecallDone) and the wire thread (InferenceTask).
Inbox = queue.SimpleQueue[InferenceItem]


# Weights are in characters of text, of which a thread renders and tokenises some 5 million a
# second: a lane's prompts take 15 ms, 0.4 s, or any time.
LANE_WEIGHTS: Final = (65_536, 2_097_152, math.inf)
VALUE_WEIGHT: Final = 16  # of a JSON value beside its text
ID_WEIGHT: Final = 4  # of a token
PAIR_WEIGHT: Final = 1 / 4  # of two messages: gpt-oss's template looks at all calls from each
# Compiling a grammar takes up to seconds: such a request never holds up the first lane's.
GRAMMAR_WEIGHT: Final = 65_536


class PromptLanes:
    """The queues of the prompt threads, by weight. Any thread."""

    def __init__(self) -> None:
        self.lanes: tuple[PromptJobs, ...] = tuple(queue.SimpleQueue() for _ in LANE_WEIGHTS)

    def put(self, job: tuple[ClientLease, PromptJob] | None) -> None:
        """Queue a job; None ends all threads, each behind what waits there."""
        if job is None:
            for lane in self.lanes:
                lane.put(None)
        else:
            self.lanes[lane_of(job[1])].put(job)


def lane_of(job: PromptJob) -> int:
    """Return the lane of a job. It takes 20 ms at most, however much is in the job."""
    weight = _weight(job)
    return next(at for at, weight_max in enumerate(LANE_WEIGHTS) if weight <= weight_max)


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
            wants = job.constraints
            is_free = wants.tool_choice == "auto" and not wants.is_json
            # Its bytes decide how long it is tokenised: a character may be as many tokens.
            predicted = len(job.prediction.encode(errors="surrogatepass"))
            return _prompt_weight(job.prompt) + predicted + (0 if is_free else GRAMMAR_WEIGHT)


def _prompt_weight(prompt: Prompt) -> float:
    raw = len(prompt.text or "") + ID_WEIGHT * len(prompt.ids)
    pairs = PAIR_WEIGHT * len(prompt.messages) ** 2
    parts = (prompt.messages, prompt.tools, prompt.deferred, prompt.template_kwargs)
    return raw + pairs + _json_weight(parts)


def _json_weight(values: Iterable[Any]) -> float:
    """Return the weight of nested JSON; of more than the last lane but one takes, only so much."""
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
