"""Defines the queues by which the threads of a worker hand work to each other."""

import queue
from collections.abc import Callable
from dataclasses import dataclass

from hearth.shared.wire_messages import Count, Status, Submit, Up
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
# One of the prompt threads' (`prompt_lanes`). From the wire thread, the image thread, and the
# inference thread (RenderNextPrompt).
PromptJobs = queue.SimpleQueue[tuple[ClientLease, PromptJob] | None]

InferenceItem = Request | PrefixQuery | RecallDone | InferenceTask
# From a prompt thread (a PrefixQuery is a prompt that is likely to come: it is prefilled in idle
# time), the disk thread (RecallDone) and the wire thread (InferenceTask).
Inbox = queue.SimpleQueue[InferenceItem]
