"""Keeps the facts that sessions have about one request, and names the request's loss."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from hearth.shared.wire_messages import Prompt, Usage
from hearth.worker.cache.block_hash import Tokens, common_length, pack
from hearth.worker.cache.image_keys import PromptImages
from hearth.worker.prompt.prompt_with_sampled_turns import PromptPrefix
from hearth.worker.sessions.conversation_lines import LineMatch
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.turn_store import Turn

# How an assistant turn is rendered: as sampled, as the client changed it, from the client's message
# (no turn is recorded), or as the template writes the turn although the sampled tokens are known.
KEPT, CHANGED, RENDERED, DROPPED = "kept", "changed", "rendered", "dropped"

# A conversation's next prompt may change up to this many tokens at the end of the last prompt.
REWRITTEN_MAX: Final = 1_024

SLACK: Final = 16  # most lost tokens that are not reported
HEAD: Final = -1  # message index for tools and template options

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
    """The reason why a prompt's tokens differ from the tokens of its line. Immutable.

    `message` is HEAD for tools and template options.
    """

    name: str  # a key of REMEDIES
    message: int
    rule: str = ""  # canonical rule, or the tool, option or part of the prompt that changed
    is_drift: bool = False  # whether a rule of the canonical pipeline explains the change


@dataclass(frozen=True, slots=True)
class Divergence:
    """One loss: the line's tokens that a request had to prefill again. Immutable.

    `token` is the position of the first token that differs. `lost` counts the tokens prefilled
    again.
    """

    cause: Cause
    token: int
    lost: int
    role: str
    was: str = ""  # the line's text around `token`, for the requester only
    now: str = ""  # the prompt's text around `token`
    # Positions of the tokens of the line that the prompt prefills again.
    reread: Tokens = field(default_factory=lambda: pack([]), compare=False, repr=False)

    def within(self, cached: int, fed: int) -> "Divergence | None":
        """Return the loss of a request that prefilled tokens `cached` to `fed`, if any.

        The cache may hold more of a prompt than the prompt's own line does: another branch may have
        computed KV that both share.
        """
        assert 0 <= cached <= fed, (cached, fed)
        first, last = np.searchsorted(self.reread, (cached, fed))
        lost = int(last - first)
        return replace(self, lost=lost) if lost > SLACK else None

    def as_row(self, shows_text: bool) -> dict[str, Any]:
        """Return the loss in the form for logs and reports, with texts only if `shows_text`."""
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
    """The facts that sessions have about one request, from its arrival to its end.

    Owner: the prompt thread until the request is handed over, then the inference thread.
    Invariant: `turns` has an entry for each message, and `shared` is at most `len(tokens)`.
    """

    prompt: Prompt
    api_key: str  # the archive's name of the API key
    line_match: LineMatch
    messages: list[dict[str, Any]]  # messages, with stripped thinking put back
    turns: list[Turn | None]  # recorded turn of each message
    states: dict[int, str]  # assistant message -> KEPT, CHANGED, RENDERED or DROPPED
    loaded: list[str] = field(default_factory=list)  # tools to show without a reference
    conversation: int = 0  # the conversation's number; 0 = the tokens do not continue the line
    images: PromptImages = field(default_factory=dict)  # images of the messages, by digest
    kind: str = "main"  # role in the session: main, agent or side
    healed: int = 0  # number of messages whose thinking was put back
    doubtful: int = 0  # number of turns with known tokens but no place in the rendered text
    ambiguous: int = 0  # number of echoes that match more than one turn
    adapter: str = ""  # the model's adapter for this request
    header: int = 0  # position at which the generation prompt begins
    prefix: PromptPrefix | None = None  # tokens before the answer
    tokens: Tokens = field(default_factory=lambda: pack([]))  # tokens of the prompt
    shared: int = 0  # number of first tokens that the line's last prompt and answer have too
    divergence: Divergence | None = None
    answer: TurnContent | None = None  # set at the request's end
    turn: Turn | None = None  # the answer's tokens, if every sampled token was delivered
    arrived_at: float = field(default_factory=time.time)

    @property
    def is_continuation(self) -> bool:
        """Whether this worker answered an earlier request of the conversation.

        Answers that the client wrote as examples don't count.
        """
        before = self.line_match.earlier
        return before is not None and before.is_own and "assistant" in self.line_match.shape.roles

    def set_prompt(
        self, tokens: Tokens, header: int, kept: frozenset[int], system_end: int = 0
    ) -> None:
        """Set the prompt's tokens. `kept` are the messages whose turns are rendered as sampled.

        The tokens decide whether the prompt continues the line's conversation: more tokens of the
        line's last prompt must be shared than left out. System and tools, up to `system_end`, don't
        count as shared, because all conversations of a client begin with the same system and tools.
        """
        assert len(self.turns) == len(self.messages), (len(self.turns), len(self.messages))
        assert 0 <= header <= len(tokens), (header, len(tokens))
        self.tokens, self.header = tokens, header
        if (before := self.line_match.earlier) is not None:
            self.shared = common_length(tokens, before.tokens)
            left_out = before.prompt_tokens - self.shared
            if left_out <= min(REWRITTEN_MAX, self.shared - system_end):
                self.conversation = before.conversation
        for at, turn in enumerate(self.turns):
            if turn is not None and at not in kept:
                self.states[at] = DROPPED

    def count(self, state: str) -> int:
        return sum(turn_state == state for turn_state in self.states.values())


@dataclass(frozen=True, slots=True)
class RequestEnding:
    """The facts with which a request ended. Immutable."""

    request_id: str
    text: str  # generated text, markup included
    answer: TurnContent  # delivered content
    sampled: Sequence[int]  # sampled token ids, without an end-of-turn token
    usage: Usage
    limit: int  # last position at which the prompt could be resumed
    is_whole: bool  # whether neither a stop string nor a client that left cut the answer
    is_cancelled: bool = False
    call_ids: tuple[str, ...] = ()  # call ids as sent to the client
    signature: str = ""  # signature of the thinking, as sent to the client
    raised: frozenset[str] = frozenset()  # the cache's error counters that the request increased
    evictions: int = 0  # number of the cache's evictions so far
