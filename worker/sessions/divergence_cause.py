"""Names the cause for which a prompt left its conversation line, with a remedy for each cause."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hearth.shared.wire_messages import MessageName
from hearth.worker.cache.block_hash import Tokens, pack
from hearth.worker.sessions.conversation_lines import EarlierLine, PromptShape

SLACK = 16  # tokens; less than this lost is no loss worth a report
SNIPPET_TOKENS = 24
SNIPPET_BEFORE = 6

NAMES_MAX = 8  # of options that changed, in one report
HEAD = -1  # the "message" that tools and template options are part of

# Causes of a message that stands where it stood: where it shows images, one may be the real cause.
IN_PLACE = frozenset(
    ("message edited", "tool result", "template", "thinking dropped", "unexplained")
)
REMEDIES = {
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


def cause_of(
    before: EarlierLine,
    now: PromptShape,
    at: int,
    message_at: int,
    turn: str,
    preserves_thinking: bool = True,
) -> Cause:
    """Return why the tokens of `now` leave those of `before` at token `at`.

    `message_at` is the message that token `at` belongs to. `turn` says how the assistant turn
    there was rendered: "kept" as sampled, "changed" by the client, "rendered" from the echo, or
    "dropped": known, but with thinking that the template leaves out where the server does not
    preserve it.
    """
    assert 0 <= at <= len(before.tokens), (at, len(before.tokens))
    was = before.shape
    first = first_difference(was, now)
    head = _head_cause(was, now)
    is_before = first is None or message_at < first
    is_likely = message_at <= 0 or (first is None and turn != "changed")
    if head is not None and is_before and is_likely:
        return head
    if first is not None and first <= message_at:
        return _message_cause(was, now, first, turn)
    if turn == "dropped" and not preserves_thinking:
        return Cause("thinking dropped", message_at)
    if turn == "kept" and not preserves_thinking:
        return Cause("template", message_at)  # its thinking was left out, and stands there again
    return _turn_cause(before, now, at, message_at, turn)


def first_difference(was: PromptShape, now: PromptShape) -> int | None:
    """Return the first message that is not what it was; None where `now` only adds some."""
    for at, (one, other) in enumerate(zip(was.names, now.names, strict=False)):
        if one.exact != other.exact:
            return at
    return len(now.names) if len(now.names) < len(was.names) else None


def _head_cause(was: PromptShape, now: PromptShape) -> Cause | None:
    """Return what changed in tools and template options."""
    if was.tools != now.tools:
        old, new = dict(was.tools), dict(now.tools)
        for name in sorted(new.keys() - old.keys()):
            return Cause("tool added", HEAD, name)
        for name in sorted(old.keys() - new.keys()):
            return Cause("tool removed", HEAD, name)
        for name in sorted(name for name in new if new[name] != old[name]):
            return Cause("tool schema", HEAD, name)
        return Cause("tool order", HEAD)
    if was.options != now.options:
        changed = sorted(dict(set(was.options) ^ set(now.options)))
        return Cause("template option", HEAD, ", ".join(changed[:NAMES_MAX]))
    return None


def _message_cause(was: PromptShape, now: PromptShape, at: int, turn: str) -> Cause:
    """Return what was done to message `at`, the first that is not what it was."""
    if at >= len(now.names):
        return Cause("message removed", at)
    old, new = was.names[at], now.names[at]
    if not old.canonical and new.canonical != old.canonical:
        return Cause("volatile field", at, _rule(old), is_drift=True)  # it vanished
    if not new.canonical:
        return Cause("volatile field", at, _rule(new), is_drift=True)  # it came
    if old.canonical == new.canonical and (old.rules or new.rules):
        return Cause("volatile field", at, _rule(old, new), is_drift=True)
    if _runs_on(was.names[at:], now.names[at + 1 :]):
        return Cause("message inserted", at)
    if _runs_on(now.names[at:], was.names[at + 1 :]):
        return Cause("message removed", at)
    if now.roles[at] == "assistant" != was.roles[at]:
        return Cause("message removed", at)
    if len(now.names) < len(was.names) and now.roles[at] != "tool":
        return Cause("history rewritten", at)
    edited = {"system": "system prompt", "tool": "tool result", "assistant": "assistant turn"}
    if now.roles[at] == "assistant" and turn == "kept":
        return Cause("template", at)  # it says the same, and was rendered otherwise before
    return Cause(edited.get(now.roles[at], "message edited"), at)


def _rule(*names: MessageName) -> str:
    return ", ".join(sorted(set(itertools.chain.from_iterable(name.rules for name in names))))


def _runs_on(one: tuple[MessageName, ...], other: tuple[MessageName, ...]) -> bool:
    """Whether both begin with the same message: one of them was moved by a message."""
    return bool(one) and bool(other) and one[0].exact == other[0].exact


def _turn_cause(
    before: EarlierLine, now: PromptShape, at: int, message_at: int, turn: str
) -> Cause:
    """Return why tokens differ although every message is what it was, or is the answer itself."""
    is_assistant = message_at < len(now.roles) and now.roles[message_at] == "assistant"
    if is_assistant and turn == "changed" and message_at >= len(before.shape.names):
        return Cause("assistant turn", message_at)
    if is_assistant and turn in ("changed", "dropped"):
        return Cause("template", message_at)
    if is_assistant and turn == "rendered":
        return Cause("turn not recorded" if at >= before.prompt_tokens else "template", message_at)
    message_at = min(message_at, len(now.names) - 1)
    # The same message, of other tokens: the template renders it by what stands behind it.
    return Cause("unexplained" if is_assistant else "template", message_at)


def not_kept(cause: str, at: int, lost: int, message: int) -> Divergence:
    """Return the loss of tokens that the line had, from token `at` on.

    `cause` is "eviction", "expired", "restart", "turn not recorded", "other adapter", or "exact
    mode": they were generated, and only what was prefilled is reused here.
    """
    return Divergence(Cause(cause, message - 1), at, lost, "")
