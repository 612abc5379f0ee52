"""Holds what the sessions know of one request, from its arrival to its end."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hearth.shared.wire_messages import Prompt, Usage
from hearth.worker.cache.block_hash import Tokens, common_length, pack
from hearth.worker.cache.image_keys import PromptImages
from hearth.worker.prompt.turn_beginnings import Beginning
from hearth.worker.sessions.conversation_lines import LinePosition
from hearth.worker.sessions.divergence_cause import Divergence
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.turn_store import Turn

# An assistant turn is rendered as sampled, as the client changed it, as it came (nothing is known
# of it), or as the template has it, though its tokens are known.
KEPT, CHANGED, RENDERED, DROPPED = "kept", "changed", "rendered", "dropped"

# Tokens at a conversation's end that its next prompt may have otherwise.
REWRITTEN_MAX: Final = 1_024


@dataclass(slots=True)
class SessionVisit:
    """One request as the sessions know it, from its arrival to its end.

    Owner: the prompt thread until it hands the request over, then the inference thread.
    Invariant: `turns` has an entry for each message, and `shared` is at most `len(tokens)`.
    """

    prompt: Prompt
    key: str  # what the speaker's API key is known by here
    place: LinePosition
    messages: list[dict[str, Any]]  # healed
    turns: list[Turn | None]  # for each message
    states: dict[int, str]  # of each assistant message
    loaded: list[str] = field(default_factory=list)  # tools to show though no reference is left
    conversation: int = 0  # its number; 0 = its line's messages go on, its tokens do not
    is_side: bool = False
    images: PromptImages = field(default_factory=dict)  # that its messages show, by digest
    kind: str = "main"  # of what it is to its session: main, agent or side
    rules: list[str] = field(default_factory=list)  # by which its messages are canonical
    shared_messages: int = 0  # of its line's last request, from the first on
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
