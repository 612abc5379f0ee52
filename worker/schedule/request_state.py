"""Holds the state of a request inside the worker: its client's lease, and its progress."""

import bisect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hearth.shared.suspects import Suspect
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Count, Sampling, Submit, TokenLogprob
from hearth.worker.cache.block_hash import PrefixHash, Tokens, pack
from hearth.worker.cache.image_keys import PromptImages
from hearth.worker.cache.prefix_search import PrefixQuery, ResumePlan
from hearth.worker.constraint.token_mask import TokenMask
from hearth.worker.disk.file_format import Record
from hearth.worker.draft.answer_drafter import AnswerDrafter
from hearth.worker.draft.draft import ForcedTokens
from hearth.worker.kv.disk_tier import DiskRecall
from hearth.worker.kv.kv_transfer import LiveSlot
from hearth.worker.schedule.client_lease import ClientLease as ClientLease
from hearth.worker.schedule.wait_estimate import Work
from hearth.worker.sessions.session_visit import SessionVisit
from hearth.worker.stream.output_processor import OutputProcessor

BEHIND_TOKENS: Final = 128  # a suspect is left alone until it is so far behind where it broke off


@dataclass(frozen=True, slots=True)
class MessageWithImages:
    """A message whose images the image thread has read; the files themselves are left behind."""

    message: Submit | Count
    images: PromptImages  # by digest


@dataclass(frozen=True, slots=True)
class RenderNextPrompt:
    """Asks the prompt thread for the prompt that is likely to follow this request, which ended."""

    request: "Request"


@dataclass(frozen=True, slots=True)
class RecallDone:
    """Says that the disk thread has read what a request waits for."""

    request: "Request"
    records: Sequence[Record | None]
    epoch: int  # of the cache that they were read for


@dataclass(slots=True)
class RequestTimes:
    """Says when a request's work began and last got further, in seconds of `awake_s`.

    Owner: the inference thread.
    """

    began_at: float  # it was given its slot
    prefilled_at: float  # its last chunk, or the start of its first
    progressed_at: float  # its last chunk or token
    logged_at: float  # when the log last said how far its prefill is; at first its start
    logged_tokens: int  # how far it was then

    def note_chunk(self) -> None:
        self.prefilled_at = self.progressed_at = awake_s()


@dataclass(slots=True)
class Request:
    """A rendered request. Owner: the inference thread, once the prompt thread handed it over.

    Invariants: `slot`, `plan` and `times` are set together when its work begins; `position` lies
    between `cached_tokens` and `query.limit`, where its decoding begins.
    """

    lease: ClientLease
    ids: list[int]  # the prompt
    query: PrefixQuery  # the same for the cache, with the cuts of its prefill
    sampling: Sampling
    tokens_max: int  # of the completion
    output: OutputProcessor
    key: str = ""  # digest of the API key whose it is, and what is kept of it; "" = everybody's
    asker: str = ""  # whose turn for a slot it uses
    turn: int = 0  # slots given when it came, or when its asker was given the last one
    new_id: Callable[[], str] = str  # of each tool call, where the model writes none that is taken
    known_ids: frozenset[str] = frozenset()  # of the calls in its prompt
    signature: str = ""  # of the thinking
    guide: TokenMask | None = None  # holds the answer to its constraints
    call_drafts: ForcedTokens | None = None  # forces tokens in its calls, which nothing constrains
    prediction: Sequence[int] = ()  # tokens that its client expects
    warnings: list[str] = field(default_factory=list)  # sentences: what is not done as asked
    uses_cache: bool = True  # else it neither finds nor leaves anything
    is_prefill_only: bool = False  # it ends where its first token would come
    pin_key: str | None = None  # whose pin its prompt becomes then, an API key's; None = nobody's
    prompt_name: PrefixHash = PrefixHash(b"")  # the hash of all its tokens
    suspects: tuple[Suspect, ...] = ()  # a worker died with its beginning, or its answer
    is_cut_beside: bool = False  # it was read in shorter forwards because answers were written
    kept_tokens: int = 0  # what was kept of it when it arrived
    told_tokens: int = 0  # what its client was told of that
    slot: LiveSlot | None = None  # held from its first forward to its end
    plan: ResumePlan | None = None  # what it started with
    canonical_tokens: int = (
        0  # of what was kept then, those that a prefill of it would have written
    )
    idle_tokens: int = 0  # of its session, read in idle time until then
    recall: DiskRecall | None = None  # what it waits for from disk
    recalls: int = 0  # how often it has waited for that
    recalled_tokens: int = 0  # that came back from there
    position: int = 0  # prompt tokens in the slot
    times: RequestTimes | None = None  # runs from its first forward on
    completion_tokens: int = 0
    drafter: AnswerDrafter | None = None  # None = nothing is drafted for it
    hidden: Any = None  # states (1, n, hidden) of the last tokens read, for a draft model
    drafted_tokens: int = 0  # of the completion, those that were drafted
    seq: int = 0  # deltas sent
    first_token_at: float | None = None
    prompt_images: PromptImages = field(default_factory=dict)  # that its messages show, by digest
    image_s: float = 0.0  # that the image encoder has worked for it
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
        return self.lease.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.ids)

    @property
    def lineage(self) -> Hashable:
        """What requests have in common that may share the KV of tokens that they begin with alike.

        The tokens of all images are the same, so that who shows others shares nothing.
        """
        return self.query.root, tuple((run.start, run.picture.name) for run in self.query.images)

    @property
    def cached_tokens(self) -> int:
        return self.plan.position if self.plan is not None else 0

    @property
    def source(self) -> str:
        """Where what was kept of the prompt came from."""
        source = self.plan.source if self.plan is not None else "none"
        return "ssd" if source == "ram" and self.recalled_tokens else source

    def start_times(self) -> None:
        assert self.times is None, self.request_id
        now = awake_s()
        self.times = RequestTimes(now, now, now, now, self.position)

    @property
    def is_prefilled(self) -> bool:
        return self.position == self.query.limit

    @property
    def runs_alone(self) -> bool:
        """Whether it has not passed the place where a worker died with its tokens."""
        done = self.position + self.completion_tokens
        return any(
            self.first_token_at is None or done <= each.tokens + BEHIND_TOKENS
            for each in self.suspects
        )

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
        assert self.position < self.query.limit, (self.position, self.query.limit)
        return bisect.bisect_right(self.query.cuts, self.position)

    def keys(self, held: list[int]) -> Tokens:
        """Return the keys of what its slot holds: the prompt's, and what was decoded."""
        prompt = self.query.tokens
        assert len(held) >= len(prompt), (len(held), len(prompt))
        return np.concatenate([prompt, pack(held[len(prompt) :])])
