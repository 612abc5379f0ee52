"""Finds the line that a request goes on with, or the one that it resembles most.

It searches what a session held at one moment, so that it needs no lock. The costs grow with the
messages of the request and with those of each line.
"""

from typing import Final

from hearth.worker.sessions.conversation_lines import (
    EarlierLine,
    LinePosition,
    LineSnapshot,
    PromptShape,
    SessionSnapshot,
    first_user,
)

# A line whose messages this share of are here again is what this one was made of.
OVERLAP_MIN: Final = 0.5
NOT_NEAR: Final = (0, False, 0)


def position_in(known: SessionSnapshot, shape: PromptShape) -> LinePosition:
    """Return which line of `known` the request goes on with. Any thread."""
    session, links = known.session, shape.links
    ends = {each.shape.chain: each for each in known.lines}
    # Two conversations that share a system prompt alone are not one: without an id, the first
    # user message must be the same too.
    least = 1 if session.is_named else first_user(shape) + 1
    for count in range(len(links) - 1, least - 1, -1):
        if links[count] != links[count - 1] and links[count] in ends:
            found = ends[links[count]]
            nearest = _nearest(known, shape, found)
            before = _before(nearest, shape, nearest is found or session.is_named)
            return LinePosition(session, shape, found.line, None, links, before)
    relative, is_alike = _relative(known, shape)
    if relative is None:
        return LinePosition(session, shape, None, None, links, None)
    before = _before(relative, shape, is_alike and session.is_named)
    return LinePosition(session, shape, None, relative.line, links, before)


def _relative(known: SessionSnapshot, shape: PromptShape) -> tuple[LineSnapshot | None, bool]:
    """Return the line that shares most messages with this request, and whether most of them.

    Of a named session also the latest with the same system prompt and tools: one that its
    client compacted has nothing else in common.
    """
    best: LineSnapshot | None = None
    nearest = NOT_NEAR
    is_named, said = known.session.is_named, shape.said
    for each in reversed(known.lines):
        theirs = each.shape
        if not theirs.names:
            continue
        shared = len(theirs.said & said)
        share = shared / max(1, min(len(theirs.said), len(said)))
        has_head = bool(shape.names) and theirs.names[0].exact == shape.names[0].exact
        is_alike = (is_named or has_head) and shared > 1 and share > OVERLAP_MIN
        if is_alike and _nearness(theirs, shape) > nearest:
            best, nearest = each, _nearness(theirs, shape)
        elif best is None and is_named and has_head and theirs.tools == shape.tools:
            best = each
    return best, nearest > NOT_NEAR


def _before(known: LineSnapshot, shape: PromptShape, is_own: bool) -> EarlierLine:
    ours, theirs = shape.names[: first_user(shape) + 1], known.shape.names
    is_own = is_own or (bool(ours) and ours == theirs[: len(ours)])
    return EarlierLine(
        *(known.shape, known.tokens, known.prompt_tokens, is_own),
        is_restored=known.is_restored,
        used_at=known.used_at,
        adapter=known.adapter,
        conversation=known.conversation,
    )


def _nearest(known: SessionSnapshot, shape: PromptShape, found: LineSnapshot) -> LineSnapshot:
    """Return the line that is nearest to a request that extends `found`.

    What was edited may stand in another, of which that line is a shorter state. That one has
    messages of the request that `found` has not, which a request that only appends shows of no
    other.
    """
    new = shape.said - found.shape.said
    others = [each for each in known.lines if not new.isdisjoint(each.shape.said)]
    return max([found, *others], key=lambda each: _nearness(each.shape, shape))


def _nearness(theirs: PromptShape, shape: PromptShape) -> tuple[int, bool, int]:
    """Return how near a line is: messages that both have, the same tools, the same beginning."""
    shared = len(theirs.said & shape.said)
    return shared, theirs.tools == shape.tools, theirs.shared_names(shape)
