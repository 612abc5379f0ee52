"""A request goes on with the line that it extends, else it opens one; nothing is written over."""

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest

from hearth.shared.wire_messages import MessageName, Prompt, Speaker
from hearth.worker.cache.block_hash import pack
from hearth.worker.sessions import conversation_lines
from hearth.worker.sessions.conversation_lines import (
    ConversationLines,
    Line,
    LinePosition,
    Session,
    chains,
    shape_of,
)
from hearth.worker.sessions.find_line import position_in

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
    names = [
        MessageName(b"" if BLANK in text else digest(text.partition("#")[0]), digest(text))
        for text in said
    ]
    return Prompt(messages, list(tools), names=names)


class Desk:
    """Requests that arrive and end, on a lineage and a clock."""

    def __init__(self, lines_max: int = 0, idle_s: float = 0.0) -> None:
        self.lines = ConversationLines(lines_max, idle_s)
        self.now = 0.0

    def arrive(
        self, said: Sequence[str], speaker: Speaker = NAMED, tools: Sequence[Any] = TOOLS
    ) -> LinePosition:
        prompt = prompt_of(said, tools)
        links = chains(prompt.names)
        session = self.lines.session(speaker, self.now)
        return position_in(self.lines.snapshot(session), shape_of(prompt, links), links)

    def end(self, place: LinePosition, tokens: int = 10) -> Line:
        line = self.lines.advance(place, self.now)
        self.lines.write(line, place.shape, pack(range(tokens)), tokens - 1)
        return line

    def ask(self, said: Sequence[str], speaker: Speaker = NAMED, **more: Any) -> Line:
        return self.end(self.arrive(said, speaker, **more))

    def session(self, speaker: Speaker = NAMED) -> Session:
        return self.lines.session(speaker, self.now)


def exact(line: Line) -> list[bytes]:
    assert line.shape is not None
    return [name.exact for name in line.shape.names]


def digests(said: Sequence[str]) -> list[bytes]:
    return [digest(text) for text in said]


# ---------------------------------------------------------------- chains


def test_a_chain_names_all_messages_before_it_in_their_order() -> None:
    names = prompt_of([*MAIN, "a:done"]).names
    links = chains(names)
    assert links[0] == b"" and len(links) == 4 and len(set(links)) == 4
    assert chains(names[:2]) == links[:3]
    assert chains([names[1], names[0], names[2]])[-1] != links[-1]


def test_a_message_whose_canonical_form_is_nothing_leaves_the_chain_as_it_is() -> None:
    links = chains(prompt_of([*MAIN, f"u:{BLANK}", "a:done"]).names)
    assert links[2] == links[3] != links[4]
    assert links[4] == chains(prompt_of([*MAIN, "a:done"]).names)[-1]


# ---------------------------------------------------------------- extending and opening


def test_a_request_that_extends_a_line_advances_it() -> None:
    desk = Desk()
    first = desk.ask(MAIN)
    longer = (*MAIN, "a:reading", "t:its text")
    place = desk.arrive(longer)
    assert place.line is first and place.relative is None and place.before is not None
    assert exact(first) == digests(MAIN), "placing changes nothing"
    assert desk.end(place, tokens=20) is first
    assert exact(first) == digests(longer)
    assert first.tokens is not None and len(first.tokens) == 20
    assert (first.turns, first.prompt_tokens) == (2, 19)
    assert list(desk.session().lines.values()) == [first]


def test_a_retry_goes_on_with_its_own_line() -> None:
    desk = Desk()
    first = desk.ask(MAIN)
    assert desk.ask(MAIN) is first and first.turns == 2


def test_of_several_lines_the_longest_that_is_extended_goes_on() -> None:
    desk = Desk()
    short = desk.ask(MAIN)
    overlapping = [desk.arrive([*MAIN, "a:x", "t:y"]), desk.arrive([*MAIN, "a:x", "u:z"])]
    assert desk.end(overlapping[0]) is short
    long = desk.end(overlapping[1])
    assert desk.arrive([*MAIN, "a:x", "u:z", "a:w", "u:v"]).line is long
    assert desk.arrive([*MAIN, "a:x", "t:y", "a:w", "u:v"]).line is short


def test_volatile_fields_do_not_break_a_line() -> None:
    desk = Desk()
    first = desk.ask(["s:you are an agent#Monday", f"u:{BLANK}", "u:fix it"])
    place = desk.arrive(["s:you are an agent#Tuesday", "u:fix it", "a:done", f"u:{BLANK} two"])
    assert place.line is first


def test_a_message_that_is_nothing_may_come_last() -> None:
    desk = Desk()
    first = desk.ask([*MAIN, f"u:{BLANK}"])
    assert desk.arrive([*MAIN, f"u:{BLANK} now", "a:done", "u:more"]).line is first
    assert desk.arrive([*MAIN, "a:done", "u:more"]).line is first


def test_what_says_nothing_is_extended_by_nothing() -> None:
    desk = Desk()
    desk.ask([f"u:{BLANK}"])
    assert desk.arrive([f"u:{BLANK} too", "u:fix it"]).line is None
    desk.ask([MAIN[0]], NOBODY)
    assert desk.arrive([MAIN[0], f"u:{BLANK}", "u:fix it"], NOBODY).line is None


def test_a_request_that_extends_none_opens_a_line() -> None:
    desk = Desk()
    first = desk.ask(MAIN)
    other = desk.ask([MAIN[0], "u:something else"])
    assert other is not first and exact(first) == digests(MAIN)
    assert other.number != first.number


def test_a_sub_agent_in_the_same_session_never_moves_the_main_lines_record() -> None:
    desk = Desk()
    main = desk.ask(MAIN)
    running = [desk.arrive([*SUB, f"u:part {n}"]) for n in range(10)]
    for place in reversed(running):
        desk.end(place)
    for n in range(10):
        desk.ask([*SUB, f"u:part {n}", "a:searching", "t:found"])
    assert exact(main) == digests(MAIN) and main.turns == 1
    assert len(desk.session().lines) == 11
    assert desk.ask([*MAIN, "a:asked ten", "t:they say"]) is main


def test_sub_agents_with_a_name_have_sessions_of_their_own() -> None:
    desk = Desk()
    main = desk.ask(MAIN)
    forked = desk.ask([*MAIN, "u:fork"], Speaker("key", "s1", agent="a1"))
    assert forked is not main and exact(main) == digests(MAIN)
    assert len(desk.session().lines) == 1


def test_of_two_overlapping_requests_on_one_line_the_later_to_end_opens_a_line() -> None:
    desk = Desk()
    main = desk.ask(MAIN)
    one, two = desk.arrive([*MAIN, "a:x", "u:one"]), desk.arrive([*MAIN, "a:x", "u:two"])
    assert one.line is two.line is main
    assert desk.end(two) is main
    later = desk.end(one)
    assert later is not main and later.parent is main and later.branch_message == 3
    assert exact(main) == digests([*MAIN, "a:x", "u:two"])
    assert exact(later) == digests([*MAIN, "a:x", "u:one"])


def test_an_overlapping_request_that_goes_further_still_advances() -> None:
    desk = Desk()
    main = desk.ask(MAIN)
    short, long = desk.arrive([*MAIN, "a:x"]), desk.arrive([*MAIN, "a:x", "u:y"])
    assert desk.end(short) is main and desk.end(long) is main
    assert exact(main) == digests([*MAIN, "a:x", "u:y"])


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
    assert place.line is None and place.relative is main and place.before is not None
    branch = desk.end(place)
    assert branch is not main and branch.parent is main and branch.branch_message == 1
    assert exact(main) == digests(history)
    assert desk.session().kind(branch) == "branch"
    assert desk.ask([*compacted, "a:done"]) is branch, "and goes on"


def test_a_conversation_that_was_taken_back_is_a_branch_where_it_leaves() -> None:
    desk = Desk()
    main = desk.ask([*MAIN, "a:x", "u:wrong"])
    branch = desk.ask([*MAIN, "a:x", "u:right"])
    assert branch.parent is main and branch.branch_message == 3


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


def test_without_an_id_other_first_questions_are_other_lines() -> None:
    """As all conversations of an agent begin with one system prompt and the same tools."""
    desk = Desk()
    one = desk.ask([MAIN[0], "u:one"], NOBODY)
    two = desk.ask([MAIN[0], "u:two"], NOBODY)
    assert one is not two and two.parent is None
    assert desk.ask([MAIN[0], "u:one", "a:x", "u:y"], NOBODY) is one
    assert desk.ask([MAIN[0], "u:two", "a:x", "u:y"], NOBODY) is two
    assert len(desk.session(NOBODY).lines) == 2


def test_without_an_id_a_system_prompt_alone_is_no_line_to_extend() -> None:
    """A client that warms the cache with its system prompt has begun no conversation."""
    desk = Desk()
    warmed = desk.ask([MAIN[0]], NOBODY)
    assert desk.ask(MAIN, NOBODY) is not warmed
    named = desk.ask([MAIN[0]])
    assert desk.ask(MAIN) is named


def test_without_an_id_the_same_first_question_and_history_is_one_line() -> None:
    desk = Desk()
    one = desk.ask(MAIN, NOBODY)
    assert desk.ask([*MAIN, "a:x", "u:y"], NOBODY) is one


def test_without_an_id_and_a_user_the_whole_request_must_be_there_again() -> None:
    desk = Desk()
    one = desk.ask(["s:a", "s:b"], NOBODY)
    assert desk.arrive(["s:a", "s:b"], NOBODY).line is one
    assert desk.arrive(["s:a", "s:c"], NOBODY).line is None


def test_without_an_id_a_branch_needs_the_same_beginning() -> None:
    desk = Desk()
    one = desk.ask([*MAIN, "a:x", "u:y"], NOBODY)
    assert desk.arrive([*MAIN, "a:x", "u:z"], NOBODY).relative is one
    assert desk.arrive(["s:other", MAIN[1], "a:x", "u:y"], NOBODY).relative is None
    desk.ask([*MAIN, "a:x", "u:y"])
    assert desk.arrive(["s:other", MAIN[1], "a:x", "u:y"]).relative is not None


# ---------------------------------------------------------------- whose line it is


def test_sessions_keys_and_agents_never_share_a_line() -> None:
    speakers = [NAMED, NOBODY, Speaker("other", "s1"), Speaker("key", "s2"), Speaker("other")]
    desk = Desk()
    lines = [desk.ask(MAIN, speaker) for speaker in speakers]
    assert len(set(lines)) == len(speakers)
    for speaker, line in zip(speakers, lines, strict=True):
        assert desk.arrive([*MAIN, "a:x"], speaker).line is line
        assert desk.session(speaker).lines == {line.number: line}
        assert desk.lines.session_of(line) is desk.session(speaker)


def test_what_a_line_is_to_its_session() -> None:
    desk = Desk()
    main = desk.lines.advance(desk.arrive(MAIN), 0.0)
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


def test_a_session_keeps_the_lines_that_were_used_last() -> None:
    """Not those opened last: four side calls must not push out a main line that goes on."""
    desk = Desk(lines_max=2)
    history = [*MAIN]
    main = desk.ask(history)
    for n in range(5):
        desk.ask([f"s:title {n}", "u:make it"])
        history += [f"a:x{n}", f"t:y{n}"]
        assert desk.ask(history) is main
    lines = desk.session().lines
    assert len(lines) == 2 and main.number in lines


def test_one_sessions_cap_leaves_other_sessions_alone() -> None:
    desk = Desk(lines_max=1)
    elsewhere = desk.ask(MAIN, Speaker("key", "s2"))
    first, second = desk.ask(MAIN), desk.ask(SUB)
    assert list(desk.session().lines.values()) == [second] != [first]
    assert desk.arrive(MAIN, Speaker("key", "s2")).line is elsewhere


def test_all_lines_together_are_capped_by_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_lines, "LINES_MAX", 3)
    desk = Desk()
    lines = [desk.ask(MAIN, Speaker("key", f"s{n}")) for n in range(3)]
    desk.ask([*MAIN, "a:x"], Speaker("key", "s0"))
    desk.ask(MAIN, Speaker("key", "s3"))
    kept = [bool(desk.session(Speaker("key", f"s{n}")).lines) for n in range(4)]
    assert kept == [True, False, True, True]
    assert desk.arrive([*MAIN, "a:x", "u:y"], Speaker("key", "s0")).line is lines[0]


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


def test_sessions_are_capped_by_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that names a new session in each request must not fill the memory."""
    monkeypatch.setattr(conversation_lines, "SESSIONS_MAX", 3)
    desk = Desk()
    for n in range(3):
        desk.ask(MAIN, Speaker("key", f"s{n}"))
    desk.arrive(MAIN, Speaker("key", "s0"))
    desk.arrive(MAIN, Speaker("key", "s3"))
    assert [each.label for each in desk.lines.sessions] == ["s2", "s0", "s3"]
    assert len(desk.lines.lines) == 2


def test_an_unused_session_is_forgotten_after_its_time() -> None:
    desk = Desk(idle_s=100)
    idle, used = Speaker("key", "idle"), Speaker("key", "used")
    desk.ask(MAIN, idle)
    line = desk.ask(MAIN, used)
    desk.now = 60
    assert desk.arrive([*MAIN, "a:x"], used).line is line
    desk.now = 100
    desk.arrive(SUB, Speaker("key", "new"))
    assert len(desk.lines.sessions) == 3, "at its time it is still there"
    desk.now = 100.5
    assert desk.arrive([*MAIN, "a:x"], used).line is line
    assert [each.label for each in desk.lines.sessions] == ["new", "used"]
    assert desk.arrive(MAIN, idle).line is None
    assert desk.lines.token_count == 10


def test_nothing_is_forgotten_for_idleness_where_that_is_off() -> None:
    desk = Desk()
    line = desk.ask(MAIN)
    desk.now = 1e9
    assert desk.arrive(MAIN).line is line


def test_the_child_of_a_forgotten_line_hangs_on_its_parents_parent() -> None:
    desk = Desk(lines_max=3)
    root = desk.ask([*MAIN, "a:x", "u:one"])
    middle = desk.ask([*MAIN, "a:x", "u:two", "a:w", "u:v"])
    child = desk.ask([*MAIN, "a:x", "u:two", "a:w", "u:z"])
    assert (middle.parent, child.parent) == (root, middle)
    assert desk.ask([*MAIN, "a:x", "u:one", "a:more"]) is root
    desk.ask(SUB)
    assert middle not in desk.session().lines.values()
    assert child.parent is root and root.parent is None


# ---------------------------------------------------------------- what is forgotten meanwhile


@pytest.mark.parametrize("how", ["cap", "idle", "cleared"])
def test_a_request_whose_line_was_forgotten_meanwhile_opens_one(how: str) -> None:
    desk = Desk(lines_max=1 if how == "cap" else 0, idle_s=100)
    main = desk.ask(MAIN)
    place = desk.arrive([*MAIN, "a:x", "u:y"])
    assert place.line is main
    if how == "cap":
        desk.ask(SUB)
    elif how == "cleared":
        desk.lines.forget_lines()
    else:
        desk.now = 1_000
        desk.arrive(MAIN, Speaker("key", "another"))
    line = desk.end(place)
    assert line is not main and line.parent is None
    assert list(desk.session().lines.values()) == [line]
    assert desk.lines.session_of(line) is desk.session()
    assert desk.ask([*MAIN, "a:x", "u:y", "a:z"]) is line, "the next request finds it"
    assert desk.lines.token_count == 10


def test_a_session_that_was_opened_again_meanwhile_takes_the_request() -> None:
    desk = Desk(idle_s=100)
    place = desk.arrive(MAIN)
    desk.now = 1_000
    desk.ask(SUB)
    line = desk.end(place)
    assert place.session is not desk.session()
    assert line in desk.session().lines.values() and len(desk.session().lines) == 2


def test_when_lines_are_forgotten_sessions_and_their_loaded_tools_stay() -> None:
    desk = Desk()
    desk.ask(MAIN)
    session = desk.session()
    session.loaded["read"] = None
    desk.lines.forget_lines()
    assert desk.session() is session and session.loaded == {"read": None}
    assert session.lines == {} and desk.lines.token_count == 0
    assert desk.arrive(MAIN).before is None
