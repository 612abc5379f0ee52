"""A request goes on with the line that it extends, else it opens one; nothing is written over."""

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest

from hearth.shared.wire_messages import MessageName, Prompt, Speaker, linked
from hearth.worker.cache.block_hash import pack
from hearth.worker.sessions import conversation_lines
from hearth.worker.sessions.conversation_lines import (
    ConversationLines,
    Line,
    LineMatch,
    Session,
    match_line,
    shape_of,
)

NAMED = Speaker("key", "s1")
NOBODY = Speaker("key")
BLANK = "<only a reminder>"  # a message whose canonical form is nothing
MAIN = ("s:you are an agent", "u:fix it")
SUB = ("s:you are a searcher", "u:find it")
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def prompt_of(said: Sequence[str], tools: Sequence[Any] = ()) -> Prompt:
    """Each message is its role's letter, a colon, its text; a date behind # is volatile."""
    messages = [{"role": ROLES[text[0]], "content": text[2:]} for text in said]
    names = linked(
        MessageName(b"" if BLANK in text else digest(text.partition("#")[0]), digest(text))
        for text in said
    )
    return Prompt(messages, list(tools), names=names)


class Desk:
    """Requests that arrive and end, on a lineage and a clock."""

    def __init__(self, lines_max: int = 0, idle_s: float = 0.0) -> None:
        self.lines = ConversationLines(lines_max, idle_s)
        self.now = 0.0

    def arrive(
        self, said: Sequence[str], speaker: Speaker = NAMED, tools: Sequence[Any] = TOOLS
    ) -> LineMatch:
        prompt = prompt_of(said, tools)
        session = self.lines.session(speaker, self.now)
        return match_line(session, self.lines.snapshot(session), shape_of(prompt))

    def end(self, place: LineMatch, tokens: int = 10) -> Line:
        extended = place.line
        conversation = extended.conversation if extended else self.lines.new_number()
        line = self.lines.advance(place, self.now, conversation)
        self.lines.write(line, place.shape, pack(range(tokens)), tokens - 1)
        return line

    def ask(self, said: Sequence[str], speaker: Speaker = NAMED, **more: Any) -> Line:
        return self.end(self.arrive(said, speaker, **more))

    def session(self, speaker: Speaker = NAMED) -> Session:
        return self.lines.session(speaker, self.now)


def exact(line: Line) -> list[bytes]:
    return [name.exact for name in line.shape.names]


def digests(said: Sequence[str]) -> list[bytes]:
    return [digest(text) for text in said]


# ---------------------------------------------------------------- extending and opening


def test_an_overlapping_request_that_is_shorter_never_cuts_the_line() -> None:
    desk = Desk()
    main = desk.ask(MAIN)
    short, long = desk.arrive([*MAIN, "a:x"]), desk.arrive([*MAIN, "a:x", "u:y"])
    assert desk.end(long) is main
    shorter = desk.end(short)
    assert shorter is not main
    assert exact(main) == digests([*MAIN, "a:x", "u:y"])
    assert desk.arrive([*MAIN, "a:x", "u:y", "a:z"]).line is main, "the longer of both"
    assert desk.arrive([*MAIN, "a:x", "u:z"]).line is shorter


def test_a_compacted_conversation_opens_a_branch_with_its_parent_and_branch_point() -> None:
    desk = Desk()
    history = [*MAIN, "a:x1", "t:y1", "a:x2", "t:y2", "u:now this"]
    main = desk.ask(history)
    compacted = [MAIN[0], "u:what was done", "a:x2", "t:y2", "u:now this"]
    place = desk.arrive(compacted)
    assert place.line is None and place.similar is main and place.earlier is not None
    branch = desk.end(place)
    assert branch is not main and branch.parent is main and branch.branch_message == 1
    assert exact(main) == digests(history)
    assert desk.session().kind(branch) == "branch"
    assert desk.ask([*compacted, "a:done"]) is branch, "and goes on"


def test_a_conversation_that_shares_little_has_no_parent() -> None:
    desk = Desk()
    desk.ask([*MAIN, "a:x", "t:y", "a:z"])
    assert desk.ask(["s:else", "u:x", "a:x", "t:y", "a:w"]).parent is None, "two of five"
    other_tools = [MAIN[0], "u:else", "a:else", "t:else"]
    assert desk.ask(other_tools, tools=()).parent is None, "the system prompt alone"


def test_in_a_session_with_an_id_the_same_system_prompt_and_tools_are_a_conversation_anew() -> None:
    """One whose client compacted it has nothing else in common with what it was made of."""
    desk = Desk()
    desk.ask([*MAIN, "a:x", "t:y"])
    latest = desk.ask([*MAIN, "a:x", "t:z"])
    compacted = desk.ask([MAIN[0], "u:what was done"])
    assert compacted.parent is latest and compacted.branch_message == 1
    nobodys = desk.ask([*MAIN, "a:x", "t:y"], NOBODY)
    assert desk.ask([MAIN[0], "u:what was done"], NOBODY).parent is None is nobodys.parent


def test_of_two_lines_that_share_messages_that_with_more_is_the_parent() -> None:
    desk = Desk()
    desk.ask([*MAIN, "a:x1", "t:y1", "a:x2", "t:y2"])
    latest = desk.ask(["s:you are an agent", "u:else", "a:else", "t:else"])
    rewritten = desk.ask([MAIN[0], "u:what was done", "a:x2", "t:y2"])
    assert rewritten.parent is not latest and rewritten.parent is not None
    assert rewritten.parent.number == 1


# ---------------------------------------------------------------- without a session's id


def test_without_an_id_a_branch_needs_the_same_beginning() -> None:
    desk = Desk()
    one = desk.ask([*MAIN, "a:x", "u:y"], NOBODY)
    assert desk.arrive([*MAIN, "a:x", "u:z"], NOBODY).similar is one
    assert desk.arrive(["s:other", MAIN[1], "a:x", "u:y"], NOBODY).similar is None
    desk.ask([*MAIN, "a:x", "u:y"])
    assert desk.arrive(["s:other", MAIN[1], "a:x", "u:y"]).similar is not None


# ---------------------------------------------------------------- whose line it is


def test_what_a_line_is_to_its_session() -> None:
    desk = Desk()
    main = desk.lines.advance(desk.arrive(MAIN), 0.0, desk.lines.new_number())
    desk.lines.write(main, desk.arrive(MAIN).shape, pack(range(90)), 80)
    sub, title = desk.ask(SUB), desk.ask(["s:make a title", "u:fix it"], tools=())
    branch = desk.ask([*SUB, "a:x", "u:y"])
    assert branch is sub
    branch = desk.ask([*SUB, "a:x", "u:else"])
    kinds = [desk.session().kind(line) for line in (main, sub, title, branch)]
    assert kinds == ["main", "sub-agent", "side", "branch"]
    agent = Speaker("key", "s1", agent="a1")
    assert desk.session(agent).kind(desk.ask(SUB, agent)) == "sub-agent"
    assert desk.session(NOBODY).kind(desk.ask(SUB, NOBODY)) == "main"


# ---------------------------------------------------------------- caps


def test_all_tokens_together_are_capped_but_never_the_last_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversation_lines, "TOKENS_MAX", 100)
    desk = Desk()
    first, second = desk.end(desk.arrive(MAIN), 60), desk.end(desk.arrive(SUB), 40)
    assert set(desk.session().lines.values()) == {first, second}
    assert desk.end(desk.arrive([*SUB, "a:x"]), 41) is second
    assert list(desk.session().lines.values()) == [second]
    assert desk.end(desk.arrive([*SUB, "a:x", "u:y"]), 500) is second
    assert list(desk.session().lines.values()) == [second], "one line alone may be longer"
