"""A conversation keeps its number while it goes on, also where its client rewrites its end."""

from pathlib import Path
from zlib import crc32

import pytest

from hearth.shared.wire_messages import Prompt, Speaker
from hearth.worker.cache.block_hash import pack
from hearth.worker.sessions.conversation_lines import Line, PromptShape
from hearth.worker.sessions.session_context import REWRITTEN_MAX, SessionContext
from hearth.worker.sessions.session_manager import SessionManager, SessionRules
from tests.helpers.worker.session_prompts import ME, SLACK, WORDS, Desk, Rows

NOBODY = Speaker("key")
SYSTEM, SHARED, END = 200, 500, 100  # where system and tools end, and what is common; tokens


def visit(
    desk: Desk,
    *said: str,
    speaker: Speaker = ME,
    shared: int = SHARED,
    end: int = END,
    system_end: int = SYSTEM,
) -> SessionContext:
    """Have a prompt arrive whose last message is `end` tokens that no other has."""
    messages = [{"role": "user", "content": text} for text in said]
    prompt = Prompt(messages, speaker=speaker, names=desk.names.names(messages)[0])
    found = desk.sessions.request_arrived(prompt)
    assert found is not None
    own = 1_000 + crc32(repr(said).encode()) % 1_000_000 * 1_000
    tokens = [*range(shared), *range(own, own + end)]
    found.set_prompt(pack(tokens), len(tokens), frozenset(), system_end)
    return found


def ended(desk: Desk, *visits: SessionContext) -> list[tuple[int, int]]:
    """Have requests end; return number and conversation of the line of each."""
    rows = []
    for each in visits:
        desk.end(each, WORDS, ())
        line = max(desk.sessions.lines.lines, key=lambda line: line.used_at)
        rows.append((line.number, line.conversation))
    return rows


def test_a_conversation_has_its_number_from_its_arrival_on() -> None:
    desk = Desk()
    first, other = visit(desk, "a", "b"), visit(desk, "else")
    assert first.conversation != other.conversation
    raw = desk.sessions.new_number()
    assert ended(desk, other, first) == [(each.conversation,) * 2 for each in (other, first)]
    assert raw not in {line.number for line in desk.sessions.lines.lines}
    later = visit(desk, "a", "b", "c")
    assert later.conversation == first.conversation
    assert ended(desk, later) == [(first.conversation,) * 2]


def test_a_prompt_with_another_end_is_of_the_same_conversation_on_a_line_of_its_own() -> None:
    desk = Desk()
    first = visit(desk, "a", "b", "one end")
    ended(desk, first)
    numbers = {first.conversation}
    for end in ("another", "a third"):
        again = visit(desk, "a", "b", end)
        assert again.line_match.line is None and again.conversation == first.conversation
        ((number, conversation),) = ended(desk, again)
        assert conversation == first.conversation and number not in numbers
        numbers.add(number)


@pytest.mark.parametrize(
    ("left_out", "shared", "system_end", "is_same"),
    [
        (REWRITTEN_MAX, 2 * REWRITTEN_MAX, 0, True),
        (REWRITTEN_MAX + 1, 2 * REWRITTEN_MAX, 0, False),
        (300, 500, 200, True),
        (301, 500, 200, False),
        (1, 200, 200, False),
        (0, 200, 200, True),
    ],
)
def test_it_shares_more_than_it_leaves_out_behind_system_and_tools(
    left_out: int, shared: int, system_end: int, is_same: bool
) -> None:
    desk = Desk()
    first = visit(desk, "a", "b", "one end", shared=shared, end=left_out)
    ended(desk, first)
    again = visit(desk, "a", "b", "another", shared=shared, system_end=system_end)
    assert (again.conversation == first.conversation) == is_same


@pytest.mark.parametrize("speaker", [Speaker("key", "s1", "agent"), Speaker("key", "s2"), NOBODY])
def test_sub_agents_and_other_sessions_keep_their_own(speaker: Speaker) -> None:
    desk = Desk()
    first = visit(desk, "a", "b", "one end")
    ended(desk, first)
    assert visit(desk, "a", "b", "another", speaker=speaker).conversation != first.conversation


def test_a_request_that_extends_a_line_with_other_tokens_is_another_conversation() -> None:
    """As one that compacts without the tools: its KV is another, and the line goes on with it."""
    desk = Desk()
    first = visit(desk, "a", "b")
    ended(desk, first)
    other = visit(desk, "a", "b", "c", shared=SYSTEM)
    assert other.line_match.line is not None and other.conversation != first.conversation
    assert ended(desk, other) == [(first.conversation, other.conversation)]


def test_two_that_overlapped_on_a_line_are_one_conversation_on_two_lines() -> None:
    desk = Desk()
    first = visit(desk, "a", "b")
    ended(desk, first)
    both = [visit(desk, "a", "b", text) for text in ("c", "d")]
    rows = ended(desk, *both)
    assert {conversation for _, conversation in rows} == {first.conversation}
    assert len({number for number, _ in rows}) == 2


def test_after_a_restart_each_line_is_a_conversation(tmp_path: Path) -> None:
    desk = Desk()
    desk.sessions = SessionManager(SessionRules(), Rows(), SLACK, tmp_path)
    ended(desk, visit(desk, "a", "b", "one end"), visit(desk, "a", "b", "another"))
    desk.sessions.close()
    desk.sessions = SessionManager(SessionRules(), Rows(), SLACK, tmp_path)
    lines = desk.sessions.lines.lines
    assert len(lines) == 2 and all(line.conversation == line.number for line in lines)
    assert visit(desk, "new").conversation > max(line.number for line in lines)
    later = visit(desk, "a", "b", "another", "more")
    assert later.line_match.line is not None and later.conversation == later.line_match.line.number


def test_lines_of_two_sessions_that_had_one_number_are_two_conversations() -> None:
    """Two workers number from 1 each, and one directory may have the records of both."""
    desk = Desk()
    for session in ("s1", "s2"):
        line = Line(1, 0.0, shape=PromptShape((), (), (), (), frozenset()), tokens=pack([1]))
        desk.sessions.lines.restore(Speaker("key", session), {}, line, 0.0)
    numbers = [line.number for line in desk.sessions.lines.lines]
    assert len(set(numbers)) == 2
    assert [line.conversation for line in desk.sessions.lines.lines] == numbers
    assert desk.sessions.new_number() not in numbers
