"""Requests that arrive and end in any order never lose or rewrite what a line stands for."""

import hashlib
import itertools

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hearth.shared.wire_messages import MessageName, Prompt, Speaker, linked
from hearth.worker.cache.block_hash import pack
from hearth.worker.sessions import conversation_lines
from hearth.worker.sessions.conversation_lines import (
    ConversationLines,
    Line,
    LineMatch,
    match_line,
    shape_of,
)

SPEAKERS = (
    *(Speaker("key", "s1"), Speaker("key", "s2"), Speaker("key", "s1", agent="a")),
    *(Speaker("other", "s1"), Speaker("key"), Speaker("other")),
)
BLANK = "u-"  # its canonical form is nothing
TEXTS = ("u0", "u1", "a0", "a1", "t0", "u0~", BLANK)  # ~ is a volatile field
HEADS = (("s0", "u0"), ("s0", "u1"), ("s1", "u0"), ("u0",), ("s0",))
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
IDLE_S = 50.0
LINES_MAX = 6
SESSIONS_MAX = 5

Said = tuple[str, ...]


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def canonical(said: Said) -> Said:
    return tuple(text.removesuffix("~") for text in said if text != BLANK)


def prompt_of(said: Said, speaker: Speaker) -> Prompt:
    names = linked(
        MessageName(b"" if text == BLANK else digest(text.removesuffix("~")), digest(text))
        for text in said
    )
    messages = [{"role": ROLES[text[0]], "content": text} for text in said]
    return Prompt(messages, speaker=speaker, names=names)


class Lines(RuleBasedStateMachine):
    """What was said on each line, beside the lineage; caps and idleness are the only losses."""

    def __init__(self) -> None:
        super().__init__()
        conversation_lines.LINES_MAX, conversation_lines.SESSIONS_MAX = (
            LINES_MAX,
            SESSIONS_MAX,
        )  # teardown undoes it
        self.now = 0.0
        self.running: list[tuple[Said, LineMatch, int]] = []  # and its conversation
        self.held: dict[Line, Said] = {}  # what each line stands for, forgotten ones too
        self.owner: dict[Line, Speaker] = {}
        self.order: list[Line] = []  # least recently written first
        self.used: dict[Speaker, float] = {}  # when each session was, least recently first

    def teardown(self) -> None:
        conversation_lines.LINES_MAX, conversation_lines.SESSIONS_MAX = self.maxima

    maxima = (conversation_lines.LINES_MAX, conversation_lines.SESSIONS_MAX)

    @initialize(lines_max=st.sampled_from((0, 1, 3)), idle=st.booleans())
    def begin(self, lines_max: int, idle: bool) -> None:
        self.lines_max, self.idle_s = lines_max, IDLE_S if idle else 0.0
        self.lines = ConversationLines(lines_max, self.idle_s)

    # ------------------------------------------------------------ what happens

    @rule(
        speaker=st.sampled_from(SPEAKERS),
        head=st.sampled_from(HEADS),
        tail=st.lists(st.sampled_from(TEXTS), max_size=3),
    )
    def a_conversation_begins(self, speaker: Speaker, head: Said, tail: list[str]) -> None:
        self.arrive((*head, *tail), speaker)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.lists(st.sampled_from(TEXTS), max_size=3), cut=st.integers(0, 2))
    def a_conversation_goes_on(self, data: st.DataObject, more: list[str], cut: int) -> None:
        """Or was taken back by `cut` messages first, or its line is forgotten by now."""
        line = data.draw(st.sampled_from(list(self.held)))
        said = self.held[line]
        self.arrive((*said[: max(1, len(said) - cut)], *more), self.owner[line])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, 30))
    def one_ends(self, data: st.DataObject, tokens: int) -> None:
        at = data.draw(st.integers(0, len(self.running) - 1))
        self.end(*self.running.pop(at), tokens)

    @precondition(lambda self: self.running)
    @rule()
    def one_is_cancelled(self) -> None:
        self.running.pop()

    @rule(seconds=st.sampled_from((1.0, IDLE_S, 2 * IDLE_S)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def the_cache_is_emptied(self) -> None:
        self.lines.forget_lines()
        self.order.clear()

    # ------------------------------------------------------------ what must come of it

    def arrive(self, said: Said, speaker: Speaker) -> None:
        before = self.stood()
        prompt = prompt_of(said, speaker)
        session = self.lines.session(speaker, self.now)
        self.expect_expiry(speaker)
        place = match_line(session, self.lines.snapshot(session), shape_of(prompt))
        # Every other branch is of its line's conversation, with another end.
        known = place.line or (place.similar if len(said) % 2 else None)
        number = known.conversation if known is not None else self.lines.new_number()
        self.running.append((said, place, number))
        assert self.stood() == {line: before[line] for line in self.order}, "placing reads only"
        self.check_choice(said, speaker, place)

    def check_choice(self, said: Said, speaker: Speaker, place: LineMatch) -> None:
        """The line is one that the request extends, and none that it extends is longer."""
        mine = [line for line in self.order if self.owner[line] == speaker]
        meant = canonical(said)
        extended = [line for line in mine if self.is_extended(line, said, speaker)]
        if place.line is None:
            assert not extended
            assert place.similar is None or place.similar in mine
            return
        assert place.line in mine and place.similar is None
        held = canonical(self.held[place.line])
        assert meant[: len(held)] == held
        assert len(held) == max(len(canonical(self.held[line])) for line in extended)

    def is_extended(self, line: Line, said: Said, speaker: Speaker) -> bool:
        held, meant = canonical(self.held[line]), canonical(said)
        if not held or meant[: len(held)] != held:
            return False
        if speaker.session:
            return True
        # Without an id, what is shared must reach the first question at least.
        first = next((at for at, text in enumerate(said) if text[0] == "u"), len(said) - 1)
        meaning = [at for at, text in enumerate(said) if text != BLANK]
        return meaning[len(held) - 1] >= first

    def end(self, said: Said, place: LineMatch, number: int, tokens: int) -> None:
        speaker, before = place.session.speaker, self.stood()
        may = place.line in self.order and self.is_extended_still(place.line, said)
        line = self.lines.advance(place, self.now, number)
        assert line.conversation == number
        if may:
            assert line is place.line, "a line that is still extended advances"
        else:
            assert line not in self.held, "else a new one is opened"
        known = place.line or place.similar
        parent = known if known in self.order else None
        self.lines.write(line, place.shape, pack(range(tokens)), tokens)
        self.use(speaker)
        self.remember(line, said, speaker)
        self.expect_caps(line, speaker)
        while parent is not None and parent not in self.order:  # the caps took it
            parent = parent.parent
        assert may or line.parent is parent
        for other in self.order:
            if other is not line:
                assert self.stood()[other] == before[other], "no other line is touched"

    def is_extended_still(self, line: Line | None, said: Said) -> bool:
        assert line is not None
        held = canonical(self.held[line])
        return canonical(said)[: len(held)] == held

    def remember(self, line: Line, said: Said, speaker: Speaker) -> None:
        if line in self.held:
            was = canonical(self.held[line])
            assert canonical(said)[: len(was)] == was, "a line only ever grows"
            self.order.remove(line)
        self.held[line], self.owner[line] = said, speaker
        self.order.append(line)

    def expect_expiry(self, speaker: Speaker) -> None:
        """Sessions go for idleness, and for those that were used after them; no others do."""
        idle = [each for each, at in self.used.items() if self.now - at > self.idle_s > 0]
        for each in idle:
            del self.used[each]
        self.use(speaker)
        gone = list(self.used)[: max(0, len(self.used) - SESSIONS_MAX)]
        for each in gone:
            del self.used[each]
        self.order = [line for line in self.order if self.owner[line] not in {*idle, *gone}]

    def use(self, speaker: Speaker) -> None:
        self.used.pop(speaker, None)
        self.used[speaker] = self.now

    def expect_caps(self, line: Line, speaker: Speaker) -> None:
        """Of too many lines those go that were written least recently, and no others."""
        mine = [each for each in self.order if self.owner[each] == speaker]
        gone = mine[: max(0, len(mine) - self.lines_max)] if self.lines_max else []
        self.order = [each for each in self.order if each not in gone][-LINES_MAX:]
        assert line in self.order

    # ------------------------------------------------------------ what holds at all times

    def stood(self) -> dict[Line, tuple[bytes, ...]]:
        """Return what each remembered line stands for."""
        lines = [line for session in self.lines.sessions for line in session.lines.values()]
        return {line: tuple(name.exact for name in line.shape.names) for line in lines}

    @invariant()
    def no_line_is_lost_but_by_caps_and_each_is_what_it_was(self) -> None:
        expected = {line: tuple(map(digest, self.held[line])) for line in self.order}
        assert self.stood() == expected
        assert self.lines.lines == self.order

    @invariant()
    def the_sessions_are_those_that_were_used_last(self) -> None:
        assert [each.speaker for each in self.lines.sessions] == list(self.used)

    @invariant()
    def sessions_are_disjoint_and_each_line_is_its_speakers(self) -> None:
        for one, other in itertools.combinations(self.lines.sessions, 2):
            assert not one.lines.keys() & other.lines.keys()
            assert one.speaker != other.speaker
        for session in self.lines.sessions:
            for number, line in session.lines.items():
                assert line.number == number and self.owner[line] == session.speaker
                assert self.lines.session_of(line) is session

    @invariant()
    def parents_are_remembered_and_lead_to_a_root(self) -> None:
        for line in self.order:
            assert line.parent is None or line.parent in self.order
            assert line.parent is None or line.parent.number < line.number
            assert line.parent is None or self.owner[line.parent] == self.owner[line]

    @invariant()
    def what_is_held_is_counted_and_bounded(self) -> None:
        self.lines.check()


TestLines = Lines.TestCase
# More than the profile's: it alone holds what requests that overlap, end and expire do to lines.
TestLines.settings = settings(max_examples=100, stateful_step_count=40)
