"""Finds the message at which a prompt leaves its own conversation line, and names the cause."""

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
from hearth.worker.sessions.session_visit import (
    HEAD,
    RENDERED,
    SLACK,
    Cause,
    Divergence,
    SessionContext,
)

SNIPPET_TOKENS: Final = 24
SNIPPET_BEFORE: Final = 6
NAMES_MAX: Final = 8  # of options that changed, in one report
# Causes of a message that stands where it stood: where it shows images, one may be the real cause.
IN_PLACE: Final = frozenset(
    ("message edited", "tool result", "template", "thinking dropped", "unexplained")
)
MOVED_TOKENS: Final = 64  # from the first that differs, in which a tool's name is looked for
RUN: Final = 16  # tokens that must stand together to be taken for the same text; a power of two
ECHO_MIN: Final = 0.5  # of an answer stand in what echoes it
HASH_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)  # odd, its bits evenly spread (Knuth)

# (tokens of the prompt that its first messages make, whether these make no others); None where
# the template refuses so few.
Boundary = Callable[[int], tuple[int, bool] | None]


def explain(
    visit: SessionContext,
    boundary: Boundary,
    decode: Callable[[Sequence[int]], str],
    preserves_thinking: bool = True,
) -> Divergence | None:
    """Return what of its line the prompt has behind other tokens, and so reads again, if anything.

    What the line had and the prompt has not is no loss: a fork, a conversation taken up from an
    earlier point and an answer that the client left out go on from what they share with the line.
    """
    before, now, at = visit.place.before, visit.place.shape, visit.shared
    if before is None:
        return None
    assert at <= min(len(visit.tokens), len(before.tokens)), (at, len(visit.tokens))
    again = tokens_read_again(before.tokens[at:], visit.tokens[at:]) + at
    if len(again) <= SLACK:
        return None
    message = message_of(at, now, before, boundary)
    again = again[: np.searchsorted(again, _end_of_shared(visit, before, message, boundary))]
    if len(again) <= SLACK:
        return None
    turn = visit.turns[message] if message == len(before.shape.names) else None
    answer = before.tokens[before.prompt_tokens :]
    if turn is not None and not np.array_equal(turn.ids[len(turn.ids) - len(answer) :], answer):
        return None  # the echo is of an answer that another line got: of this one nothing is lost
    state = visit.states.get(message, RENDERED)
    cause = cause_of(before, now, at, message, state, preserves_thinking)
    if cause.name in ("template", "unexplained"):
        cause = template_cause(visit, cause, boundary, decode)
    if cause.name in IN_PLACE:
        cause = image_cause(before.tokens, visit.tokens, at, message) or cause
    role = now.roles[cause.message] if 0 <= cause.message < len(now.roles) else "head"
    start = max(0, at - SNIPPET_BEFORE)
    # The text of another conversation is not shown, though it looks alike.
    shown = slice(start, start + SNIPPET_TOKENS if before.is_own else start)
    was, new = (decode(tokens[shown].tolist()) for tokens in (before.tokens, visit.tokens))
    return Divergence(cause, at, len(again), role, was, new, again)


def template_cause(
    visit: SessionContext, cause: Cause, boundary: Boundary, decode: Callable[[Sequence[int]], str]
) -> Cause:
    """Return `cause`, or that the template caused it, where old messages are rendered anew.

    The template did so if the old messages, rendered alone, leave the line at the same token. Some
    templates move the tools, or the system prompt, to the last question ("template moves").
    """
    before, at = visit.place.before, visit.shared
    assert before is not None, "what has a cause left a line"
    if cause.name == "unexplained":
        alone = boundary(len(before.shape.names))
        if alone is None or alone[0] > at:
            return cause
        cause = replace(cause, name="template")
    was = before.tokens[at : at + MOVED_TOKENS]
    is_in_loop = visit.messages[max(0, cause.message)]["role"] in ("assistant", "tool")
    if is_in_loop or not len(tokens_read_again(was[:RUN], visit.tokens[at:])):
        return cause
    text = decode(was.tolist())
    if any(name in text for name, _ in before.shape.tools):
        return Cause("template moves", HEAD, "tools")
    start = decode(was[:RUN].tolist()).strip()
    first = visit.messages[0]
    if first["role"] == "system" and start in text_of(first):
        return Cause("template moves", 0, "system prompt")
    return cause


def tokens_read_again(was: Tokens, now: Tokens) -> Tokens:
    """Return where in `now` runs of `RUN` tokens or more stand that `was` has too, in order.

    Runs are compared by 64-bit polynomial hashes: a false match shows one loss too large.
    """
    if min(len(was), len(now)) < RUN:
        return pack([])
    starts = np.flatnonzero(np.isin(_run_hashes(now), _run_hashes(was)))
    edges = np.zeros(len(now) + 1, np.int32)
    np.add.at(edges, starts, 1)
    np.add.at(edges, starts + RUN, -1)
    return pack(np.flatnonzero(np.cumsum(edges[:-1])).tolist())


def _run_hashes(tokens: Tokens) -> NDArray[np.uint64]:
    """Return the hash of each run of `RUN` tokens: each doubling joins two neighbouring runs."""
    with np.errstate(over="ignore"):
        hashes = (tokens.astype(np.uint64) + np.uint64(1)) * HASH_FACTOR
        hashes ^= hashes >> np.uint64(29)
        factor, width = HASH_FACTOR, 1
        while width < RUN:
            hashes = hashes[:-width] * factor + hashes[width:]
            factor, width = factor * factor, 2 * width
    return hashes


def _end_of_shared(
    visit: SessionContext, before: EarlierLine, first: int, boundary: Boundary
) -> int:
    """Return where the last thing ends that the line has too, from message `first` on.

    What is new behind it may look like something of the line, as each reminder looks like the last
    one; it would be read in any case.
    """
    now, at = visit.place.shape, visit.shared
    last = _last_shared(before.shape, now, first)
    end = at
    if last is not None:
        found = boundary(last + 1)
        # Where what follows changes how a message is rendered, its end is not known.
        end = found[0] if found is not None and found[1] else len(visit.tokens)
    answer = before.tokens[before.prompt_tokens :]
    echo = tokens_read_again(answer, visit.tokens[at:]) + at
    is_echo = len(echo) > 0 and len(echo) >= ECHO_MIN * len(answer)
    return max(end, int(echo[-1]) + 1) if is_echo else end


def _last_shared(was: PromptShape, now: PromptShape, first: int) -> int | None:
    """Return the last message from `first` on that the line has from there on too, if any.

    The echo of the line's answer is one, whatever the client made of it, and so is `first` itself
    where it was edited in place: the conversation goes on behind it.
    """
    # A template that renders two answers in a row as one hides where the first of them ends.
    other = first_difference(was, now)
    start = max(0, first if other is None else min(first, other))
    known = {digest for name in was.names[start:] for digest in (name.exact, name.canonical)}
    known.discard(b"")
    asked = len(was.names)
    is_echo = (
        0 < asked < len(now.names)
        and now.roles[asked] == "assistant"
        and was.names[-1].canonical == now.names[asked - 1].canonical
    )
    for at in range(len(now.names) - 1, start - 1, -1):
        if (is_echo and at == asked) or not known.isdisjoint(
            (now.names[at].exact, now.names[at].canonical)
        ):
            return at
    is_in_place = start < len(was.roles) and was.roles[start] == now.roles[start]
    return start if is_in_place and start < len(now.roles) - 1 else None


def image_cause(was: Tokens, now: Tokens, at: int, message: int) -> Cause | None:
    """Return what became of an image, where the first token that differs is one's.

    The images of a prompt are counted from 1.
    """
    was_image, is_image = (at < len(keys) and keys[at] < 0 for keys in (was, now))
    if not (was_image or is_image):
        return None
    name = "image added" if not was_image else "image removed" if not is_image else "image changed"
    earlier, _ = image_borders(now[:at])
    return Cause(name, message, f"image {len(earlier) + 1}")


def message_of(at: int, now: PromptShape, before: EarlierLine, boundary: Boundary) -> int:
    """Return the message that token `at` belongs to.

    One that echoes what was last answered, behind what was asked, has all tokens from the answer
    on. Else each question is a prompt that is built, so the first message that is not what it was
    is tried before any bisection: it nearly always is the one.
    """
    was, asked = before.shape, len(before.shape.names)
    is_echo = now.names[:asked] == was.names and now.roles[asked : asked + 1] == ("assistant",)
    if at >= before.prompt_tokens and is_echo:
        return asked

    def covers(message: int) -> bool:
        """Whether the messages up to this one make token `at`."""
        found = boundary(message + 1)
        # Where later messages change how earlier ones are rendered, what both share ends at `at`.
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
    pairs = enumerate(zip(was.names, now.names, strict=False))
    end = len(now.names) if len(now.names) < len(was.names) else None
    return next((at for at, (one, other) in pairs if one.exact != other.exact), end)


def _head_cause(was: PromptShape, now: PromptShape) -> Cause | None:
    """Return what changed in tools and template options."""
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
