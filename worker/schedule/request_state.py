"""A request inside the worker: its client's side, and what has been done for it."""

import bisect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hearth.shared.wire_messages import Count, Sampling, Submit, TokenLogprob
from hearth.shared.zmq_transport import LEASE_S
from hearth.worker.cache.block_hash import Tokens, pack
from hearth.worker.cache.image_keys import ImageName, ImageRun, PromptImages
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.cache.resume_planner import ResumePlan
from hearth.worker.constraint.token_mask import TokenMask
from hearth.worker.disk.file_format import Record
from hearth.worker.kv.disk_tier import DiskRecall
from hearth.worker.kv.live_slots import LiveSlot
from hearth.worker.schedule.wait_estimate import Work
from hearth.worker.sessions.session_manager import SessionVisit
from hearth.worker.stream.output_processor import OutputProcessor


class ClientLease:
    """The client's side of a request: who asked, and whether they still want it.

    Written by the I/O thread only, read by all: each field is one assignment.
    """

    def __init__(self, request_id: str, peer: bytes) -> None:
        self.request_id = request_id
        self.peer = peer
        self.received_at = time.monotonic()
        self.lease_until = self.received_at + LEASE_S
        self.is_cancelled = False

    def renew(self) -> None:
        self.lease_until = time.monotonic() + LEASE_S

    @property
    def is_gone(self) -> bool:
        return self.is_cancelled or time.monotonic() > self.lease_until


@dataclass(frozen=True, slots=True)
class MessageWithImages:
    """A message whose images have been read."""

    message: Submit | Count
    pictures: PromptImages


@dataclass(frozen=True, slots=True)
class RenderNextPrompt:
    """Render what the next prompt will be, now that this request has ended."""

    request: "Request"


@dataclass(frozen=True, slots=True)
class RecallDone:
    """What a request was waiting for has been read from disk."""

    request: "Request"
    records: Sequence[Record | None]
    epoch: int  # of the cache that they were read for


@dataclass(slots=True)
class RequestTimes:
    """When a request's work began, and when it last got further; monotonic seconds."""

    began_at: float  # it was given its slot
    prefilled_at: float  # its last chunk, or the start of its first
    progressed_at: float  # its last chunk or token
    told_at: float  # when the log was told how far its prefill is, or its start
    told_tokens: int  # how far it was then

    def chunk(self) -> None:
        self.prefilled_at = self.progressed_at = time.monotonic()

    def token(self) -> None:
        self.progressed_at = time.monotonic()


@dataclass(slots=True)
class Request:
    """A rendered request. Owner: the inference thread, once the prompt thread handed it over."""

    ticket: ClientLease
    ids: list[int]  # the prompt
    query: PrefixQuery  # the same for the cache, with the cuts of its prefill
    sampling: Sampling
    tokens_max: int  # of the completion
    output: OutputProcessor
    asker: str = ""  # whose turn for a slot it uses
    turn: int = 0  # see `fairness`
    new_id: Callable[[], str] = str  # of each tool call
    signature: str = ""  # of the thinking
    guide: TokenMask | None = None  # holds the answer to its constraints
    is_kept: bool = True  # else it neither finds nor leaves anything
    is_prefill: bool = False  # it ends where its first token would come
    pin_key: str | None = None  # whose pin its prompt becomes then, an API key's; None = nobody's
    kept_tokens: int = 0  # what was kept of it when it arrived
    slot: LiveSlot | None = None  # held from its first forward to its end
    plan: ResumePlan | None = None  # what it started with
    recall: DiskRecall | None = None  # what it waits for from disk
    recalls: int = 0  # how often it has waited for that
    recalled_tokens: int = 0  # that came back from there
    position: int = 0  # prompt tokens in the slot
    clock: RequestTimes | None = None  # runs from its first forward on
    completion_tokens: int = 0
    seq: int = 0  # deltas sent
    first_token_at: float | None = None
    pictures: PromptImages = field(default_factory=dict)  # that its messages show
    seen_to: int = 0  # images of the prompt that end here or before were encoded if need be, once
    visit: SessionVisit | None = None  # who asks, and what is known of it
    end_id: int | None = None  # the end-of-turn token that was sampled
    is_expired: bool = False  # the watchdog ended it
    sampled: list[int] = field(default_factory=list)  # without an end-of-turn token
    call_ids: list[str] = field(default_factory=list)  # of the calls that were delivered
    logprobs: list[TokenLogprob] = field(default_factory=list)  # that wait for the next delta
    shared: dict[str, int] = field(default_factory=dict)  # request id -> tokens prefilled alike

    @property
    def request_id(self) -> str:
        return self.ticket.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.ids)

    @property
    def image_tokens(self) -> int:
        return sum(run.end - run.start for run in self.query.images)

    @property
    def cached_tokens(self) -> int:
        return self.plan.position if self.plan is not None else 0

    @property
    def source(self) -> str:
        """Where what was kept of the prompt came from."""
        source = self.plan.source if self.plan is not None else "none"
        return "ssd" if source == "ram" and self.recalled_tokens else source

    def start_clock(self) -> None:
        now = time.monotonic()
        self.clock = RequestTimes(now, now, now, now, self.position)

    @property
    def is_prefilled(self) -> bool:
        return self.position == self.query.limit

    @property
    def left_tokens(self) -> int:
        """Prompt tokens that must still be prefilled."""
        return self.query.limit - self.position

    def work(self, now: float) -> Work:
        """Return what is left to do, as far as it is known. Any thread.

        Of one that waits, what was kept when it came, or is being prefilled for another, is not.
        """
        if self.first_token_at is not None:
            return Work(0, now - self.first_token_at)
        if self.plan is not None:
            return Work(self.left_tokens)
        shared = max([self.kept_tokens, *list(self.shared.values())])
        return Work(max(self.query.limit - shared, 0))

    def next_cut(self) -> int:
        """Return which of the query's cuts the next forward goes to."""
        return bisect.bisect_right(self.query.cuts, self.position)

    def keys(self, held: list[int]) -> Tokens:
        """Return the keys of what its slot holds: the prompt's, and what was decoded."""
        prompt = self.query.tokens
        return np.concatenate([prompt, pack(held[len(prompt) :])])

    def images_to(self, end: int) -> Iterator[ImageRun]:
        """Yield the images that a forward to `end` reads, wholly or in part."""
        return (r for r in self.query.images if r.start < end and self.position < r.end)

    def begun_images(self) -> Iterator[ImageName]:
        """Yield the names of images that were looked at and are not read to their end."""
        for run in self.query.images:
            if self.position < run.end <= self.seen_to:
                yield run.picture.name
