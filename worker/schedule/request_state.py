"""Holds the state of a request inside the worker: its client's lease, and its progress."""

import bisect
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hearth.shared.our_ids import call_id_for
from hearth.shared.suspects import Suspect
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import CallStart, Count, Delta, Sampling, Submit, TokenLogprob
from hearth.worker.cache.block_hash import PrefixHash, Tokens, pack
from hearth.worker.cache.image_keys import PromptImages
from hearth.worker.cache.prefix_search import PrefixQuery, ResumePlan
from hearth.worker.constraint.token_mask import TokenMask
from hearth.worker.disk.file_format import Record
from hearth.worker.draft.answer_drafter import AnswerDrafter, AnswerSources
from hearth.worker.kv.disk_tier import DiskRecall
from hearth.worker.kv.kv_transfer import LiveSlot
from hearth.worker.schedule.client_lease import ClientLease as ClientLease
from hearth.worker.schedule.wait_estimate import Work
from hearth.worker.sessions.session_context import SessionContext
from hearth.worker.stream.answer_parts import AnswerPart
from hearth.worker.stream.output_processor import OutputPiece, OutputProcessor


@dataclass(slots=True)
class AnswerDeltas:
    """Numbers one answer's deltas and names its calls. Owner: the inference thread."""

    request_id: str
    new_id: Callable[[], str] = str  # of each tool call, where the model writes none that is taken
    known_ids: frozenset[str] = frozenset()  # of the calls in its prompt
    signature: str = ""  # of the thinking
    call_ids: list[str] = field(default_factory=list)  # of the calls that were delivered
    logprobs: list[TokenLogprob] = field(default_factory=list)  # that wait for the next delta
    seq: int = 0  # deltas sent

    def of(self, piece: OutputPiece) -> Iterator[Delta]:
        """Yield the deltas of a piece; its first content carries the log probabilities that waited.

        None of them waits beyond the beginning of a call.
        """
        self.logprobs += piece.logprobs
        for part in piece.parts:
            if part.name:
                yield from self.last()
            yield self._delta(part)

    def last(self) -> Iterator[Delta]:
        """Yield an empty delta for log probabilities that no text followed, if there are any."""
        if self.logprobs:
            yield self._delta(AnswerPart("content", ""))
        assert not self.logprobs, len(self.logprobs)

    def _delta(self, part: AnswerPart) -> Delta:
        call = None
        if part.name:
            taken = {*self.known_ids, *self.call_ids}
            call = CallStart(call_id_for(part.call_id, part.name, taken, self.new_id()), part.name)
            self.call_ids.append(call.id)
        logprobs: list[TokenLogprob] = []
        if part.channel == "content":
            logprobs, self.logprobs = self.logprobs, []
        self.seq += 1
        return Delta(self.request_id, self.seq - 1, part.channel, part.text, logprobs, call)


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


@dataclass(frozen=True, slots=True)
class PrefillOnly:
    """Marks a request that ends where its first token would come."""

    pin_key: str | None = None  # the API key whose pin its prompt becomes; None = nobody's


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Says of what a request is suspected, and by which name it will be if its worker dies."""

    prompt_name: PrefixHash = PrefixHash(b"")  # the hash of all its tokens
    suspects: tuple[Suspect, ...] = ()  # a worker died with its beginning, or its answer


@dataclass(slots=True)
class KeptPrefix:
    """Says how much of a waiting request's prompt is kept, and what of it the disk still has.

    Owner: `Admission`, in the inference thread.
    """

    tokens: int = 0  # that were kept when it arrived, or came back from disk since
    reported_tokens: int = 0  # what its client was told of that
    shared: dict[str, int] = field(default_factory=dict)  # request id -> tokens prefilled alike
    recall: DiskRecall | None = None  # what it waits for from disk
    recalls: int = 0  # how often it has waited for that
    recalled_tokens: int = 0  # that came back from there


@dataclass(slots=True)
class PrefillState:
    """Says what the prefill of a prompt began with, and how it goes on.

    Owner: `PrefillForwards`, in the inference thread.
    """

    plan: ResumePlan  # what it started with
    canonical_tokens: int  # of what was kept then, those that a prefill would have written
    idle_tokens: int  # of its session, read in idle time until then
    logged_at: float  # when the log last said how far it is; at first its start
    logged_tokens: int  # how far it was then
    is_cut_beside: bool = False  # it was read in shorter forwards because answers were written
    encoder_s: float = 0.0  # that the image encoder has worked for it
    encoded_to: int = 0  # images that end here or before were encoded if need be, once


@dataclass(slots=True)
class RequestTimes:
    """Says when a request's work began and last got further, in seconds of `awake_s`.

    Owner: the inference thread.
    """

    began_at: float  # it was given its slot
    prefilled_at: float  # its last chunk, or the start of its first
    progressed_at: float  # its last chunk or token
    first_token_at: float | None = None
    is_expired: bool = False  # the watchdog ended it

    def note_chunk(self) -> None:
        self.prefilled_at = self.progressed_at = awake_s()


@dataclass(slots=True)
class Request:
    """A rendered request. Owner: the inference thread, once the prompt thread handed it over.

    Invariants: `slot`, `prefill` and `times` are set together when its work begins; `position` lies
    between `cached_tokens` and `query.limit`, where its decoding begins.
    """

    lease: ClientLease
    ids: list[int]  # the prompt
    query: PrefixQuery  # the same for the cache, with the cuts of its prefill
    sampling: Sampling
    tokens_max: int  # of the completion
    output: OutputProcessor
    deltas: AnswerDeltas  # what its client is sent
    api_key: str = ""  # digest of the API key whose it is, and what is kept of it; "" = everybody's
    asker: str = ""  # whose turn for a slot it uses
    turn: int = 0  # slots given when it came, or when its asker was given the last one
    guide: TokenMask | None = None  # holds the answer to its constraints
    draft_sources: AnswerSources | None = None  # what it brings along to be drafted from
    warnings: list[str] = field(default_factory=list)  # sentences: what is not done as asked
    uses_cache: bool = True  # else it neither finds nor leaves anything
    prefill_only: PrefillOnly | None = None
    suspicion: Suspicion = Suspicion()
    visit: SessionContext | None = None  # who asks, and what is known of it
    kept: KeptPrefix = field(default_factory=KeptPrefix)
    slot: LiveSlot | None = None  # held from its first forward to its end
    prefill: PrefillState | None = None
    position: int = 0  # prompt tokens in the slot
    times: RequestTimes | None = None  # runs from its first forward on
    drafter: AnswerDrafter | None = None  # None = nothing is drafted for it
    sampled: list[int] = field(default_factory=list)  # without an end-of-turn token
    end_id: int | None = None  # the end-of-turn token that was sampled

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
        return self.prefill.plan.position if self.prefill is not None else 0

    @property
    def source(self) -> str:
        """Where what was kept of the prompt came from."""
        source = self.prefill.plan.source if self.prefill is not None else "none"
        return "ssd" if source == "ram" and self.kept.recalled_tokens else source

    @property
    def first_token_at(self) -> float | None:
        return self.times.first_token_at if self.times is not None else None

    @property
    def completion_tokens(self) -> int:
        return len(self.sampled) + (self.end_id is not None)

    def begin(self, slot: LiveSlot, plan: ResumePlan, idle_tokens: int) -> None:
        """Take the slot, which holds the beginning of the prompt as `plan` says."""
        assert self.slot is None and self.times is None, self.request_id
        assert slot.position == plan.position <= self.query.limit, (slot.position, plan)
        now = awake_s()
        self.slot, self.position = slot, plan.position
        canonical = min(slot.canonical_to, plan.position)
        self.prefill = PrefillState(plan, canonical, idle_tokens, now, plan.position)
        self.times = RequestTimes(now, now, now)

    @property
    def is_prefilled(self) -> bool:
        return self.position == self.query.limit

    @property
    def runs_alone(self) -> bool:
        """Whether it has not passed the place where a worker died with its tokens."""
        done = self.position + self.completion_tokens
        return any(
            self.first_token_at is None or done <= each.tokens + BEHIND_TOKENS
            for each in self.suspicion.suspects
        )

    @property
    def left_tokens(self) -> int:
        """Prompt tokens that must still be prefilled."""
        return self.query.limit - self.position

    def work(self, now: float) -> Work:
        """Return what is left to do, as far as it is known. Any thread.

        Of one that waits, what was kept when it came, or is being prefilled for another, is not.
        """
        first = self.first_token_at
        if first is not None:
            return Work(0, now - first)
        if self.prefill is not None:
            return Work(self.left_tokens)
        shared = max([self.kept.tokens, *list(self.kept.shared.values())])
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
