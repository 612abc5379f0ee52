"""Finds the message at which a prompt leaves its conversation line, and names the cause."""

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hearth.shared.wire_messages import MessageName
from hearth.worker.cache.block_hash import Tokens, pack
from hearth.worker.cache.image_keys import image_borders
from hearth.worker.prompt.chat_template import text_of
from hearth.worker.sessions.conversation_lines import EarlierLine, PromptShape
from hearth.worker.sessions.session_context import (
    HEAD,
    RENDERED,
    SLACK,
    Cause,
    Divergence,
    SessionContext,
)

SNIPPET_TOKENS: Final = 24
SNIPPET_BEFORE: Final = 6
NAMES_MAX: Final = 8  # names of changed options in one report
# Causes in a message that kept its place. An image in such a message may be the real cause.
IN_PLACE: Final = frozenset(
    ("message edited", "tool result", "template", "thinking dropped", "unexplained")
)
MOVED_TOKENS: Final = 64  # tokens after the first difference that are searched for a tool's name
RUN: Final = 16  # equal tokens in a row that count as the same text; a power of two
ECHO_MIN: Final = 0.5  # least share of an answer's tokens that makes an echo
HASH_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)  # an odd number with evenly spread bits (Knuth)

# Number of first messages -> (number of their tokens when rendered alone, whether the whole prompt
# begins with exactly these tokens); None if the template refuses so few messages.
Boundary = Callable[[int], tuple[int, bool] | None]


def explain(
    context: SessionContext,
    boundary: Boundary,
    decode: Callable[[Sequence[int]], str],
    preserves_thinking: bool = True,
) -> Divergence | None:
    """Return the divergence after which the prompt reads tokens of its line again, if any.

    Tokens of the line that the prompt lacks are no loss: the prompt may be a fork, resume the
    conversation at an earlier point, or leave out an answer, and reuses the shared beginning.
    """
    before, shape, at = context.line_match.earlier, context.line_match.shape, context.shared
    if before is None:
        return None
    assert at <= min(len(context.tokens), len(before.tokens)), (at, len(context.tokens))
    reread = tokens_read_again(before.tokens[at:], context.tokens[at:]) + at
    if len(reread) <= SLACK:
        return None
    message = message_of(at, shape, before, boundary)
    reread = reread[: np.searchsorted(reread, _end_of_shared(context, before, message, boundary))]
    if len(reread) <= SLACK:
        return None
    turn = context.turns[message] if message == len(before.shape.names) else None
    answer = before.tokens[before.prompt_tokens :]
    if turn is not None and not np.array_equal(turn.ids[len(turn.ids) - len(answer) :], answer):
        return None  # the prompt echoes another line's answer, so this line loses nothing
    state = context.states.get(message, RENDERED)
    cause = cause_of(before, shape, at, message, state, preserves_thinking)
    if cause.name in ("template", "unexplained"):
        cause = template_cause(context, cause, boundary, decode)
    if cause.name in IN_PLACE:
        cause = image_cause(before.tokens, context.tokens, at, message) or cause
    role = shape.roles[cause.message] if 0 <= cause.message < len(shape.roles) else "head"
    start = max(0, at - SNIPPET_BEFORE)
    # Text of another conversation is not shown, even if both begin alike.
    shown = slice(start, start + SNIPPET_TOKENS if before.is_own else start)
    was_text, now_text = (
        decode(tokens[shown].tolist()) for tokens in (before.tokens, context.tokens)
    )
    return Divergence(cause, at, len(reread), role, was_text, now_text, reread)


def template_cause(
    context: SessionContext,
    cause: Cause,
    boundary: Boundary,
    decode: Callable[[Sequence[int]], str],
) -> Cause:
    """Return `cause`, or the template as the cause if it renders old messages in another way.

    The template is the cause if the old messages, rendered alone, leave the line at the same token.
    Some templates move the tools or the system prompt to the last question ("template moves").
    """
    before, at = context.line_match.earlier, context.shared
    assert before is not None, "a cause without an earlier line"
    if cause.name == "unexplained":
        alone = boundary(len(before.shape.names))
        if alone is None or alone[0] > at:
            return cause
        cause = replace(cause, name="template")
    was = before.tokens[at : at + MOVED_TOKENS]
    is_in_loop = context.messages[max(0, cause.message)]["role"] in ("assistant", "tool")
    if is_in_loop or not len(tokens_read_again(was[:RUN], context.tokens[at:])):
        return cause
    text = decode(was.tolist())
    if any(name in text for name, _ in before.shape.tools):
        return Cause("template moves", HEAD, "tools")
    start = decode(was[:RUN].tolist()).strip()
    first = context.messages[0]
    if first["role"] == "system" and start in text_of(first):
        return Cause("template moves", 0, "system prompt")
    return cause


def tokens_read_again(was: Tokens, now: Tokens) -> Tokens:
    """Return the positions in `now` of all runs of `RUN` or more tokens that `was` also has.

    The positions ascend. Runs are compared by 64-bit polynomial hashes. A false match only makes a
    reported loss too large.
    """
    if min(len(was), len(now)) < RUN:
        return pack([])
    starts = np.flatnonzero(np.isin(_run_hashes(now), _run_hashes(was)))
    edges = np.zeros(len(now) + 1, np.int32)
    np.add.at(edges, starts, 1)
    np.add.at(edges, starts + RUN, -1)
    return pack(np.flatnonzero(np.cumsum(edges[:-1])).tolist())


def _run_hashes(tokens: Tokens) -> NDArray[np.uint64]:
    """Return the hash of each run of `RUN` tokens. Each doubling joins two neighbouring runs."""
    with np.errstate(over="ignore"):
        hashes = (tokens.astype(np.uint64) + np.uint64(1)) * HASH_FACTOR
        hashes ^= hashes >> np.uint64(29)
        factor, width = HASH_FACTOR, 1
        while width < RUN:
            hashes = hashes[:-width] * factor + hashes[width:]
            factor, width = factor * factor, 2 * width
    return hashes


def _end_of_shared(
    context: SessionContext, before: EarlierLine, first: int, boundary: Boundary
) -> int:
    """Return the end of the last part, from message `first` on, that the line has too.

    New text after that end may resemble text of the line, for example if each message has a similar
    reminder. New text is prefilled in any case.
    """
    now, at = context.line_match.shape, context.shared
    last = _last_shared(before.shape, now, first)
    end = at
    if last is not None:
        found = boundary(last + 1)
        # If later messages change the rendering of a message, the end of that message is unknown.
        end = found[0] if found is not None and found[1] else len(context.tokens)
    answer = before.tokens[before.prompt_tokens :]
    echo = tokens_read_again(answer, context.tokens[at:]) + at
    is_echo = len(echo) > 0 and len(echo) >= ECHO_MIN * len(answer)
    return max(end, int(echo[-1]) + 1) if is_echo else end


def _last_shared(was: PromptShape, now: PromptShape, first: int) -> int | None:
    """Return the last message, from `first` on, that the line has after the same point, if any.

    The echo of the line's answer counts as shared, however the client changed it. Message `first`
    counts as shared if it was edited in place and other messages follow.
    """
    # A template that joins two successive answers hides the end of the first answer.
    difference = first_difference(was, now)
    start = max(0, first if difference is None else min(first, difference))
    known = {digest for name in was.names[start:] for digest in (name.exact, name.canonical)}
    known.discard(b"")
    asked_count = len(was.names)
    is_echo = (
        0 < asked_count < len(now.names)
        and now.roles[asked_count] == "assistant"
        and was.names[-1].canonical == now.names[asked_count - 1].canonical
    )
    for at in range(len(now.names) - 1, start - 1, -1):
        if (is_echo and at == asked_count) or not known.isdisjoint(
            (now.names[at].exact, now.names[at].canonical)
        ):
            return at
    is_in_place = start < len(was.roles) and was.roles[start] == now.roles[start]
    return start if is_in_place and start < len(now.roles) - 1 else None


def image_cause(was: Tokens, now: Tokens, at: int, message: int) -> Cause | None:
    """Return how an image changed, if the first differing token is an image's.

    A prompt's images are counted from 1.
    """
    was_image, is_image = (at < len(keys) and keys[at] < 0 for keys in (was, now))
    if not (was_image or is_image):
        return None
    name = "image added" if not was_image else "image removed" if not is_image else "image changed"
    earlier, _ = image_borders(now[:at])
    return Cause(name, message, f"image {len(earlier) + 1}")


def message_of(at: int, now: PromptShape, before: EarlierLine, boundary: Boundary) -> int:
    """Return the message that token `at` belongs to.

    All tokens from the answer on belong to the echo of the line's answer. For other tokens, each
    check renders a prompt, so the first changed message is checked before any bisection: nearly
    always, the token belongs to this message.
    """
    was, asked_count = before.shape, len(before.shape.names)
    is_echo = now.names[:asked_count] == was.names and now.roles[asked_count : asked_count + 1] == (
        "assistant",
    )
    if at >= before.prompt_tokens and is_echo:
        return asked_count

    def covers(message: int) -> bool:
        """Return whether the rendering of the messages up to `message` reaches token `at`."""
        found = boundary(message + 1)
        # If later messages change the rendering of earlier ones, the shared tokens end at `at`.
        return found is not None and (found[0] > at or (found[0] == at and not found[1]))

    low, high = 0, len(now.names) - 1
    first = first_difference(was, now)
    if first is not None and first < high:
        if not covers(first):
            low = first + 1
        elif first == 0 or not covers(first - 1):
            return first
        else:
            high = first - 1
    return bisect.bisect_left(range(high), True, low, key=covers)


# ---------------------------------------------------------------- causes


def cause_of(
    before: EarlierLine,
    now: PromptShape,
    at: int,
    message_at: int,
    turn: str,
    preserves_thinking: bool = True,
) -> Cause:
    """Return why the tokens of `now` differ from those of `before` from token `at` on.

    `message_at` is the message that token `at` belongs to. `turn` says how an assistant turn in
    this message was rendered: "kept" as sampled, "changed" by the client, "rendered" from the echo,
    or "dropped". In a dropped turn, whose tokens are known, the template leaves out the thinking,
    unless the server preserves thinking.
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
        return Cause("template", message_at)  # thinking that was left out is rendered now
    return _turn_cause(before, now, at, message_at, turn)


def first_difference(was: PromptShape, now: PromptShape) -> int | None:
    """Return the first message that changed; None if `now` only adds messages."""
    pairs = enumerate(zip(was.names, now.names, strict=False))
    end = len(now.names) if len(now.names) < len(was.names) else None
    return next((at for at, (old, new) in pairs if old.exact != new.exact), end)


def _head_cause(was: PromptShape, now: PromptShape) -> Cause | None:
    """Return what changed in the tools and template options."""
    if was.tools != now.tools:
        old, new = dict(was.tools), dict(now.tools)
        for cause, names in (
            ("tool added", new.keys() - old.keys()),
            ("tool removed", old.keys() - new.keys()),
            ("tool schema", {name for name in new if new[name] != old.get(name)}),
        ):
            if names:
                return Cause(cause, HEAD, min(names))
        return Cause("tool order", HEAD)
    if was.options != now.options:
        changed = sorted(dict(set(was.options) ^ set(now.options)))
        return Cause("template option", HEAD, ", ".join(changed[:NAMES_MAX]))
    return None


def _message_cause(was: PromptShape, now: PromptShape, at: int, turn: str) -> Cause:
    """Return what happened to message `at`, the first changed message."""
    if at >= len(now.names):
        return Cause("message removed", at)
    old, new = was.names[at], now.names[at]
    if not old.canonical and new.canonical != old.canonical:
        return Cause("volatile field", at, _rule(old), is_drift=True)  # the field was removed
    if not new.canonical:
        return Cause("volatile field", at, _rule(new), is_drift=True)  # the field was added
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
        return Cause("template", at)  # the same words were rendered in another way
    return Cause(edited.get(now.roles[at], "message edited"), at)


def _rule(*names: MessageName) -> str:
    return ", ".join(sorted(set(itertools.chain.from_iterable(name.rules for name in names))))


def _runs_on(names: tuple[MessageName, ...], shifted_names: tuple[MessageName, ...]) -> bool:
    """Return whether the messages are only shifted: both lists begin with the same message."""
    return bool(names) and bool(shifted_names) and names[0].exact == shifted_names[0].exact


def _turn_cause(
    before: EarlierLine, now: PromptShape, at: int, message_at: int, turn: str
) -> Cause:
    """Return why tokens differ although every message is unchanged or is the line's answer."""
    is_assistant = message_at < len(now.roles) and now.roles[message_at] == "assistant"
    if is_assistant and turn == "changed" and message_at >= len(before.shape.names):
        return Cause("assistant turn", message_at)
    if is_assistant and turn in ("changed", "dropped"):
        return Cause("template", message_at)
    if is_assistant and turn == "rendered":
        return Cause("turn not recorded" if at >= before.prompt_tokens else "template", message_at)
    message_at = min(message_at, len(now.names) - 1)
    # The same message has other tokens: the messages that follow change the rendering.
    return Cause("unexplained" if is_assistant else "template", message_at)
