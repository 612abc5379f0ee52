"""Holds what the sessions know of one request, from its arrival to its end, and what it lost."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from hearth.shared.wire_messages import Prompt, Usage
from hearth.worker.cache.block_hash import Tokens, common_length, pack
from hearth.worker.cache.image_keys import PromptImages
from hearth.worker.prompt.prompt_with_sampled_turns import Beginning
from hearth.worker.sessions.conversation_lines import LinePosition
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.turn_store import Turn

# An assistant turn is rendered as sampled, as the client changed it, as it came (nothing is known
# of it), or as the template has it, though its tokens are known.
KEPT, CHANGED, RENDERED, DROPPED = "kept", "changed", "rendered", "dropped"

# Tokens at a conversation's end that its next prompt may have otherwise.
REWRITTEN_MAX: Final = 1_024

SLACK: Final = 16  # tokens; less than this lost is no loss worth a report
HEAD: Final = -1  # the "message" that tools and template options are part of

REMEDIES: Final = {
    "tool added": "List tools in a stable order from the start, or mark late ones defer_loading.",
    "tool removed": "Keep the tool list of a session as it was.",
    "tool order": "Send the tools in one order.",
    "tool schema": "Keep descriptions and schemas of a session's tools as they were.",
    "template option": "Send the same thinking and template options through a session.",
    "volatile field": "Have the client leave the field out, or put it behind what is stable.",
    "system prompt": "Keep the system prompt of a session as it was; put news into new messages.",
    "tool result": "The client rewrote an old tool result: turn off its truncation.",
    "assistant turn": "The client or its user changed an answer; it is read as it was sent.",
    "message edited": "The client or its user changed a message; it is read as it was sent.",
    "message inserted": "Have the client append messages instead of inserting them.",
    "message removed": "Have the client keep messages, or send passing ones last and alone.",
    "image added": "An image came into an old message: put it into a new one.",
    "image changed": "Another image stands there, or the same one in another size: have the "
    "client send old images as it sent them first.",
    "image removed": "The client took an old image out: have it keep them, or keep more of them.",
    "history rewritten": "The client compacted its history; what both have in common is reused.",
    "template": "The model's template renders old messages by what stands behind them; no setting "
    "changes that.",
    "template moves": "The model's template moves this to the last question, so that each question "
    "has all behind its old place read again; what helps is another template beside the weights, "
    "as chat_template.jinja, that keeps it in front.",
    "thinking dropped": "The model's template leaves old thinking out; PRESERVE_THINKING=true "
    "keeps it.",
    "turn not recorded": "The answer was cut by a stop string, or is too old to be remembered.",
    "eviction": "Raise CACHE_RAM_BUDGET_MB, or run fewer conversations at once.",
    "expired": "It was unused for PROMPT_CACHE_TTL_SECONDS: raise it, or MAX_KV_SIZE_GB, so that "
    "the disk keeps it.",
    "restart": "The server was restarted and this was not on its disk: raise MAX_KV_SIZE_GB.",
    "exact mode": "CACHE_EXACT=false also reuses what was generated or prefilled by other cuts, at "
    "the price of the last bits.",
    "other adapter": "KV of another adapter, or of none, is kept apart: have a conversation stay "
    "with one model name.",
    "unexplained": "Please report this with the session's log: the server should have known.",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause for which tokens differ. `message` is HEAD for tools and options. Immutable."""

    name: str  # a key of REMEDIES
    message: int
    rule: str = ""  # the canonical rule, tool, option or part of the prompt that it is about
    is_drift: bool = False  # a rule of the canonical pipeline explains it


@dataclass(frozen=True, slots=True)
class Divergence:
    """One loss: `token` is the first that differs, `lost` how many held tokens are read again.

    Immutable.
    """

    cause: Cause
    token: int
    lost: int
    role: str
    was: str = ""  # decoded, around `token`: for the requester only
    now: str = ""
    again: Tokens = field(default_factory=lambda: pack([]), compare=False, repr=False)  # which

    def within(self, cached: int, fed: int) -> "Divergence | None":
        """Return the loss of a request that prefilled tokens `cached` to `fed`, if it has one.

        The cache may hold more of a prompt than its own line does: a branch that was there before.
        """
        assert 0 <= cached <= fed, (cached, fed)
        first, last = np.searchsorted(self.again, (cached, fed))
        lost = int(last - first)
        return replace(self, lost=lost) if lost > SLACK else None

    def as_row(self, shows_text: bool) -> dict[str, Any]:
        """Return the loss as logs and reports have it; texts only where `shows_text`."""
        assert self.lost > 0, self.lost
        row: dict[str, Any] = {
            "token": self.token,
            "message": self.cause.message,
            "role": self.role,
            "cause": self.cause.name,
            "rule": self.cause.rule or None,
            "lost": self.lost,
            "remedy": REMEDIES[self.cause.name],
        }
        return row | {"was": self.was, "now": self.now} if shows_text else row


@dataclass(slots=True)
class SessionContext:
    """One request as the sessions know it, from its arrival to its end.

    Owner: the prompt thread until it hands the request over, then the inference thread.
    Invariant: `turns` has an entry for each message, and `shared` is at most `len(tokens)`.
    """

    prompt: Prompt
    api_key: str  # what the speaker's API key is known by here
    place: LinePosition
    messages: list[dict[str, Any]]  # healed
    turns: list[Turn | None]  # for each message
    states: dict[int, str]  # of each assistant message
    loaded: list[str] = field(default_factory=list)  # tools to show though no reference is left
    conversation: int = 0  # its number; 0 = its line's messages go on, its tokens do not
    images: PromptImages = field(default_factory=dict)  # that its messages show, by digest
    kind: str = "main"  # of what it is to its session: main, agent or side
    healed: int = 0
    doubtful: int = 0  # turns whose tokens are known and whose span was not found
    ambiguous: int = 0  # echoes that more than one turn says
    adapter: str = ""  # that the model has for it
    header: int = 0  # the token at which the generation prompt begins
    begins: Beginning | None = None  # what its answer is sampled behind
    tokens: Tokens = field(default_factory=lambda: pack([]))  # of the prompt
    shared: int = 0  # tokens that the prompt shares with its own line's last
    divergence: Divergence | None = None
    said: TurnContent | None = None  # what was answered
    turn: Turn | None = None  # the same as tokens, where all that was sampled was delivered
    arrived_at: float = field(default_factory=time.time)

    @property
    def goes_on(self) -> bool:
        """Whether its conversation was answered here before: examples of answers are no sign."""
        before = self.place.before
        return before is not None and before.is_own and "assistant" in self.place.shape.roles

    def set_prompt(
        self, tokens: Tokens, header: int, kept: frozenset[int], system_end: int = 0
    ) -> None:
        """Take the prompt's tokens, and which turns stand in it as they were sampled.

        They say whether the conversation is an earlier line's: the prompt shares more of that one's
        last prompt than it leaves out, system and tools (up to `system_end`) not counted. All that
        a client asks begins with these, and one that only sends the end otherwise goes on with it.
        """
        assert len(self.turns) == len(self.messages), (len(self.turns), len(self.messages))
        assert 0 <= header <= len(tokens), (header, len(tokens))
        self.tokens, self.header = tokens, header
        if (before := self.place.before) is not None:
            self.shared = common_length(tokens, before.tokens)
            left_out = before.prompt_tokens - self.shared
            if left_out <= min(REWRITTEN_MAX, self.shared - system_end):
                self.conversation = before.conversation
        for at, turn in enumerate(self.turns):
            if turn is not None and at not in kept:
                self.states[at] = DROPPED

    def count(self, state: str) -> int:
        return sum(each == state for each in self.states.values())


@dataclass(frozen=True, slots=True)
class RequestEnding:
    """The facts with which a request ended. Immutable."""

    request_id: str
    text: str  # as it was generated, markup included
    said: TurnContent  # the same as it was delivered
    sampled: Sequence[int]  # without an end-of-turn token
    usage: Usage
    limit: int  # the furthest position at which the prompt could be resumed
    is_whole: bool  # not cut by a stop string, nor by a client that left
    is_cancelled: bool = False
    call_ids: tuple[str, ...] = ()  # of its calls, as the client was given them
    signature: str = ""  # of its thinking, likewise
    raised: frozenset[str] = frozenset()  # the cache's counters of correctness that it raised
    evictions: int = 0  # of the cache until then
