"""Holds the state of a request inside the worker: prompt, slot and progress."""

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
    new_id: Callable[[], str] = str  # makes the id of a tool call that has no usable id
    known_ids: frozenset[str] = frozenset()  # call ids in the prompt
    signature: str = ""  # signature of the thinking
    call_ids: list[str] = field(default_factory=list)  # ids of the delivered calls
    logprobs: list[TokenLogprob] = field(default_factory=list)  # buffered for the next delta
    seq: int = 0  # deltas sent

    def of(self, piece: OutputPiece) -> Iterator[Delta]:
        """Yield the deltas of a piece; the first content delta carries the buffered logprobs.

        Before a call begins, an empty delta carries the logprobs that are still buffered.
        """
        self.logprobs += piece.logprobs
        for part in piece.parts:
            if part.name:
                yield from self.last()
            yield self._delta(part)

    def last(self) -> Iterator[Delta]:
        """If logprobs are buffered, yield an empty delta with these."""
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


BEHIND_TOKENS: Final = 128  # a suspect runs alone until so many tokens past the death


@dataclass(frozen=True, slots=True)
class MessageWithImages:
    """Carries a message and its processed images, without the image files."""

    message: Submit | Count
    images: PromptImages  # by digest


@dataclass(frozen=True, slots=True)
class RenderNextPrompt:
    """Asks the prompt thread to render the prompt that is likely to follow a finished request."""

    request: "Request"


@dataclass(frozen=True, slots=True)
class RecallDone:
    """Brings the KV that the disk thread has read for a request."""

    request: "Request"
    records: Sequence[Record | None]
    epoch: int  # how often the cache had been emptied when the read began


@dataclass(frozen=True, slots=True)
class PrefillOnly:
    """Marks a request that ends before its first token."""

    pin_api_key: str | None = None  # digest of the API key that pins the prompt; None = no pin


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Holds the suspects that match a request, and the name under which the request is recorded."""

    prompt_name: PrefixHash = PrefixHash(b"")  # hash of all tokens of the prompt
    suspects: tuple[Suspect, ...] = ()  # one per worker that died during this request


@dataclass(slots=True)
class KeptPrefix:
    """Says how much of a waiting request's prompt has kept KV, in memory and on disk.

    Owner: `Admission`, in the inference thread.
    """

    tokens: int = 0  # prompt tokens with kept KV, or with KV that is being read from disk
    reported_tokens: int = 0  # `tokens` as first reported to the client
    shared: dict[str, int] = field(default_factory=dict)  # request id -> length of common beginning
    recall: DiskRecall | None = None  # disk read that the request waits for
    recalls: int = 0  # disk reads that the request has waited for
    recalled_tokens: int = 0  # tokens gained by these disk reads


@dataclass(slots=True)
class PrefillState:
    """Holds the start and the progress of a prompt's prefill.

    Owner: `PrefillForwards`, in the inference thread.
    """

    plan: ResumePlan  # kept KV that the prefill started from
    canonical_tokens: int  # tokens of canonical KV in `plan`
    idle_tokens: int  # tokens prefilled for the session in idle time before the start
    logged_at: float  # time of this prefill's last log line; at first the start
    logged_tokens: int  # position at `logged_at`
    is_cut_beside: bool = False  # some forward was shortened because other requests decoded
    encoder_s: float = 0.0  # seconds of the image encoder
    encoded_to: int = 0  # position up to which images have been encoded


@dataclass(slots=True)
class RequestTimes:
    """Holds the times of a request's start and of its last progress, in seconds of `awake_s`.

    Owner: the inference thread.
    """

    began_at: float  # time of getting the slot
    prefilled_at: float  # end of the last chunk; at first the start
    progressed_at: float  # end of the last chunk or time of the last token
    first_token_at: float | None = None
    is_expired: bool = False  # True for a request that the watchdog ended

    def record_chunk(self) -> None:
        self.prefilled_at = self.progressed_at = awake_s()


@dataclass(slots=True)
class Request:
    """Holds a rendered request. Owner: a prompt thread, then the inference thread.

    Invariants: `slot`, `prefill` and `times` are set together when the request gets its slot;
    `position` lies between `cached_tokens` and `query.limit`, where decoding begins.
    """

    lease: ClientLease
    ids: list[int]  # token ids of the prompt
    query: PrefixQuery  # the prompt in the form for cache searches, with the prefill's cuts
    sampling: Sampling
    tokens_max: int  # limit of the completion
    output: OutputProcessor
    deltas: AnswerDeltas  # makes the deltas for the client
    api_key: str = ""  # digest of the API key; "" for requests without one
    queue_name: str = ""  # name of the fair queue for slots, one per session
    queue_order: int = 0  # slots given when the request arrived or its queue last got a slot
    guide: TokenMask | None = None  # enforces the constraints of the answer
    draft_sources: AnswerSources | None = None  # texts of the request to draft from
    warnings: list[str] = field(default_factory=list)  # sentences on options without effect
    uses_cache: bool = True  # False: the cache is neither read nor written
    prefill_only: PrefillOnly | None = None
    suspicion: Suspicion = Suspicion()
    session_context: SessionContext | None = None
    kept: KeptPrefix = field(default_factory=KeptPrefix)
    slot: LiveSlot | None = None  # held from the first forward to the end
    prefill: PrefillState | None = None
    position: int = 0  # prompt tokens in the slot
    times: RequestTimes | None = None  # set with the slot
    drafter: AnswerDrafter | None = None  # None = nothing is drafted
    sampled: list[int] = field(default_factory=list)  # sampled ids without an end-of-turn token
    end_id: int | None = None  # sampled end-of-turn token

    @property
    def request_id(self) -> str:
        return self.lease.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.ids)

    @property
    def lineage(self) -> Hashable:
        """Identity of the prompt's KV apart from the token ids: root and images.

        Requests with the same lineage and the same first tokens may share KV. All images have the
        same token ids, so the lineage names the images.
        """
        return self.query.root, tuple((run.start, run.image.name) for run in self.query.images)

    @property
    def cached_tokens(self) -> int:
        return self.prefill.plan.position if self.prefill is not None else 0

    @property
    def source(self) -> str:
        """Source of the prompt's kept KV, as Usage names it."""
        source = self.prefill.plan.source if self.prefill is not None else "none"
        return "ssd" if source == "ram" and self.kept.recalled_tokens else source

    @property
    def first_token_at(self) -> float | None:
        return self.times.first_token_at if self.times is not None else None

    @property
    def completion_tokens(self) -> int:
        return len(self.sampled) + (self.end_id is not None)

    def begin(self, slot: LiveSlot, plan: ResumePlan, idle_tokens: int) -> None:
        """Take the slot, which by `plan` holds the KV of the prompt's beginning."""
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
        """Whether a worker died during this request, at a position that is not passed yet."""
        done = self.position + self.completion_tokens
        return any(
            self.first_token_at is None or done <= suspect.tokens + BEHIND_TOKENS
            for suspect in self.suspicion.suspects
        )

    @property
    def left_tokens(self) -> int:
        """Prompt tokens that must still be prefilled."""
        return self.query.limit - self.position

    def work(self, now: float) -> Work:
        """Return the remaining work, as far as known. Any thread.

        For a waiting request, tokens with kept KV and tokens that another request prefills do not
        count.
        """
        first = self.first_token_at
        if first is not None:
            return Work(0, now - first)
        if self.prefill is not None:
            return Work(self.left_tokens)
        shared = max([self.kept.tokens, *list(self.kept.shared.values())])
        return Work(max(self.query.limit - shared, 0))

    def next_cut(self) -> int:
        """Return the index in `query.cuts` of the next cut."""
        assert self.position < self.query.limit, (self.position, self.query.limit)
        return bisect.bisect_right(self.query.cuts, self.position)

    def keys(self, tokens: list[int]) -> Tokens:
        """Return the cache's keys of the slot's `tokens`: the prompt and decoded tokens."""
        prompt = self.query.tokens
        assert len(tokens) >= len(prompt), (len(tokens), len(prompt))
        return np.concatenate([prompt, pack(tokens[len(prompt) :])])
