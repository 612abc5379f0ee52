"""Finds the message at which a prompt leaves its own conversation line, and why."""

from collections.abc import Callable, Sequence

from hearth.worker.cache.block_hash import Tokens
from hearth.worker.cache.image_keys import image_borders
from hearth.worker.sessions.conversation_lines import EarlierLine, PromptShape
from hearth.worker.sessions.divergence_cause import (
    IN_PLACE,
    SLACK,
    SNIPPET_BEFORE,
    SNIPPET_TOKENS,
    Cause,
    Divergence,
    cause_of,
    first_difference,
)
from hearth.worker.sessions.session_manager import RENDERED, SessionVisit

# (tokens of the prompt that its first messages make, whether these make no others); None where
# the template refuses so few.
Boundary = Callable[[int], tuple[int, bool] | None]


def explain(
    visit: SessionVisit, boundary: Boundary, decode: Callable[[Sequence[int]], str]
) -> Divergence | None:
    """Return what the prompt lost against its line by other tokens, if it lost anything.

    An answer that is asked for again, of the same messages, loses nothing.
    """
    before, now, at = visit.place.before, visit.place.shape, visit.shared
    if before is None:
        return None
    assert at <= min(len(visit.tokens), len(before.tokens)), (at, len(visit.tokens))
    lost = _held(visit, before) - at
    is_again = now.chain == before.shape.chain and at >= before.prompt_tokens - SLACK
    if lost <= SLACK or is_again:
        return None
    message = answer_to(before, now) if at >= before.prompt_tokens else None
    if message is None:
        message = message_of(at, now, before.shape, boundary)
    state = visit.states.get(message, RENDERED)
    cause = cause_of(before, now, at, message, state)
    if cause.name in IN_PLACE:
        cause = image_cause(before.tokens, visit.tokens, at, message) or cause
    role = now.roles[cause.message] if 0 <= cause.message < len(now.roles) else "head"
    start = max(0, at - SNIPPET_BEFORE)
    was, new = (
        decode(tokens[start : start + SNIPPET_TOKENS].tolist())
        for tokens in (before.tokens, visit.tokens)
    )
    # The text of another conversation is not shown, though it looks alike.
    shown = (was, new) if before.is_own else ("", "")
    return Divergence(cause, at, lost, role, *shown)


def _held(visit: SessionVisit, before: EarlierLine) -> int:
    """Return how many tokens the line had where this request left it.

    A fork, or a conversation taken up from an earlier point, goes on from a state that the line
    once had: behind the answer that it had then, nothing is the line's or the model's.
    """
    now, links = visit.place.shape, set(visit.place.links)
    if visit.place.line is None:
        for chain, (messages, tokens) in reversed(before.past):
            if chain in links:
                behind = messages + 1
                later = {name.exact for name in before.shape.names[behind:]}
                is_left = later.isdisjoint(name.exact for name in now.names[behind:])
                is_left = is_left and "assistant" not in now.roles[behind:]
                return tokens if is_left else len(before.tokens)
    return len(before.tokens)


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


def answer_to(before: EarlierLine, now: PromptShape) -> int | None:
    """Return the message that echoes what was last answered, where it follows what was asked."""
    asked = len(before.shape.names)
    is_asked_again = now.names[:asked] == before.shape.names
    is_echo = len(now.roles) > asked and now.roles[asked] == "assistant"
    return asked if is_asked_again and is_echo else None


def message_of(at: int, now: PromptShape, was: PromptShape, boundary: Boundary) -> int:
    """Return the message that token `at` belongs to.

    Each question is a prompt that is built, so the first message that is not what it was is tried
    before any bisection: it nearly always is the one.
    """

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
    while low < high:
        middle = (low + high) // 2
        if covers(middle):
            high = middle
        else:
            low = middle + 1
    return low
