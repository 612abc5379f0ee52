"""Finds the message at which a prompt leaves its own line, and why."""

from collections.abc import Callable, Sequence

from worker.sessions.divergence import (
    SLACK,
    SNIPPET_BEFORE,
    SNIPPET_TOKENS,
    Divergence,
    cause_of,
)
from worker.sessions.lineage import Line, Shape
from worker.sessions.sessions import RENDERED, Visit

# (tokens of the prompt that its first messages make, whether these make no others); None where
# the template refuses so few.
Boundary = Callable[[int], tuple[int, bool] | None]


def explain(
    visit: Visit, boundary: Boundary, decode: Callable[[Sequence[int]], str]
) -> Divergence | None:
    """Return what the prompt lost against its line by other tokens, if it lost anything.

    An answer that is asked for again, of the same messages, loses nothing.
    """
    before, now, at = visit.place.before, visit.place.shape, visit.shared
    if before is None or before.tokens is None or before.shape is None:
        return None
    lost = _held(visit, before) - at
    is_again = now.chain == before.shape.chain and at >= before.prompt_tokens - SLACK
    if lost <= SLACK or is_again:
        return None
    message = answer_to(before, now) if at >= before.prompt_tokens else None
    if message is None:
        message = message_of(at, len(now.names), boundary)
    state = visit.states.get(message, RENDERED)
    cause = cause_of(before, now, at, message, state)
    role = now.roles[cause.message] if 0 <= cause.message < len(now.roles) else "head"
    start = max(0, at - SNIPPET_BEFORE)
    was, new = (
        decode(tokens[start : start + SNIPPET_TOKENS].tolist())
        for tokens in (before.tokens, visit.tokens)
    )
    return Divergence(cause, at, lost, role, was, new)


def _held(visit: Visit, before: Line) -> int:
    """Return how many tokens the line had where this request left it.

    A fork, or a conversation taken up from an earlier point, goes on from a state that the line
    once had: behind the answer that it had then, nothing is the line's or the model's.
    """
    now, links = visit.place.shape, set(visit.place.links)
    assert before.tokens is not None and before.shape is not None
    if visit.place.line is None:
        for chain, (messages, tokens) in reversed(before.past.items()):
            if chain in links:
                behind = messages + 1
                later = {name.exact for name in before.shape.names[behind:]}
                is_left = later.isdisjoint(name.exact for name in now.names[behind:])
                is_left = is_left and "assistant" not in now.roles[behind:]
                return tokens if is_left else len(before.tokens)
    return len(before.tokens)


def answer_to(before: Line, now: Shape) -> int | None:
    """Return the message that echoes what was last answered, where it follows what was asked."""
    assert before.shape is not None
    asked = len(before.shape.names)
    is_asked_again = now.names[:asked] == before.shape.names
    is_echo = len(now.roles) > asked and now.roles[asked] == "assistant"
    return asked if is_asked_again and is_echo else None


def message_of(at: int, count: int, boundary: Boundary) -> int:
    """Return the message that token `at` belongs to, of `count`, by bisection."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        found = boundary(middle + 1)
        # Where later messages change how earlier ones are rendered, what both share ends at `at`.
        if found is not None and (found[0] > at or (found[0] == at and not found[1])):
            high = middle
        else:
            low = middle + 1
    return low
