"""Keeps the conversations of each session as lines, and finds the line that a request goes on with.

A line is a conversation that only grows. A request that extends the canonical messages of a line
goes on with it; one that extends none opens a line, so that a sub-agent never writes over its
orchestrator's record. Nothing here decides what KV is valid.
"""

import hashlib
import itertools
import secrets
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hearth.shared.wire_messages import START, MessageName, Prompt, Speaker
from hearth.worker.cache.block_hash import Tokens, pack

SESSIONS_MAX = 4_096
LINES_MAX = 512  # remembered of all sessions together
TOKENS_MAX = 32_000_000  # of all lines' prompts together: 128 MB
PAST_MAX = 256  # requests of one line by which an archive recognises its later versions
REQUESTS_MAX = 64  # rows that are remembered of one line
SIDE_MESSAGES_MAX = 4  # of a title, a topic check, a quota probe

NAME_CHARS_MAX = 80  # of a tool or an option, in memory and reports

UID_BYTES = 8
# A line whose messages this share of are here again is what a request was made of.
OVERLAP_MIN = 0.5
NOT_NEAR = (0, False, 0)


@dataclass(frozen=True, slots=True)
class PromptShape:
    """A prompt without its text: enough to find out later what changed. Immutable."""

    names: tuple[MessageName, ...] = ()
    roles: tuple[str, ...] = ()
    tools: tuple[tuple[str, bytes], ...] = ()  # name and digest of each, in the client's order
    options: tuple[tuple[str, bytes], ...] = ()  # of the template: name and digest of the value
    said: frozenset[bytes] = frozenset()  # the exact digest of each message, in no order

    @property
    def chain(self) -> bytes:
        """The link of all its messages."""
        return self.names[-1].link if self.names else START

    @property
    def links(self) -> list[bytes]:
        """The link before each message, then that of them all."""
        return [START, *(name.link for name in self.names)]

    def shared_names(self, other: "PromptShape") -> int:
        """Return how many messages both begin with, canonically the same."""
        pairs = zip(self.names, other.names, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0].link == pair[1].link, pairs))

    @property
    def is_side(self) -> bool:
        """Whether it has the size of a side call: it can neither act nor tell much."""
        return not self.tools and len(self.names) <= SIDE_MESSAGES_MAX


@dataclass(frozen=True, slots=True)
class LineFacts:
    """What people know a line by, but for its title, which is in memory only. Immutable."""

    label: str = ""  # of the session that it is reported under
    client: str = ""  # the program that sent its last request, for people
    begun_at: float = 0.0  # wall clock, in seconds; 0 = before anyone noted it
    lost: int = 0  # tokens, of all of its requests
    decode_speed: float | None = None  # tokens a second, of the last answer that told one


@dataclass(eq=False, slots=True)
class Line:
    """One conversation. `shape` and `tokens` are of its last request, answer included.

    Both are empty until its first request is written to it.

    `number` is for people, and unique in one worker at a time; `uid` is the line's for ever.
    `conversation` is that of its last request's tokens, by which KV is ranked and reported: mostly
    the number of the line that began it.
    `past` has the chain of each of its requests, with how many messages and tokens it was then.
    Owner: the ConversationLines that hold it.
    """

    number: int
    used_at: float
    parent: "Line | None" = field(default=None, repr=False)
    branch_message: int = 0  # the first message that is not the parent's
    branch_token: int = 0
    shape: PromptShape = PromptShape()
    tokens: Tokens = field(default_factory=lambda: pack([]), repr=False)
    prompt_tokens: int = 0  # of `tokens`, how many were the prompt
    turns: int = 0
    past: OrderedDict[bytes, tuple[int, int]] = field(default_factory=OrderedDict, repr=False)
    rows: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=REQUESTS_MAX))
    uid: bytes = field(default_factory=lambda: secrets.token_bytes(UID_BYTES))
    is_restored: bool = False  # from an earlier worker, and not gone on with since
    adapter: str = ""  # that the model had for the last request
    about: LineFacts = LineFacts()
    title: str = field(default="", repr=False)  # its first question's words; in memory only
    conversation: int = 0

    def copy(self) -> "Line":
        """Return the line as it is now, which stays so."""
        return replace(self, past=self.past.copy(), rows=self.rows.copy())


@dataclass(eq=False, slots=True)
class Session:
    """All lines of one speaker. One without an id holds those of everyone who has none.

    Those are told apart in reports by their lines' labels, so that a conversation which moves from
    one client to another still finds its line here. Owner: the ConversationLines that hold it.
    """

    speaker: Speaker
    lines: dict[int, Line] = field(default_factory=dict)
    client: str = ""  # as of LineFacts
    title: str = field(default="", repr=False)  # of its first request that was no side call
    has_side_title: bool = False  # until such a one comes
    loaded: dict[str, bytes] = field(default_factory=dict)  # deferred tool -> opening of where
    used_at: float = 0.0

    @property
    def is_named(self) -> bool:
        return bool(self.speaker.session)

    @property
    def is_agent(self) -> bool:
        """Whether its client says that it works for another."""
        return bool(self.speaker.agent or self.speaker.parent)

    @property
    def label(self) -> str:
        """The session's name in reports; "anonymous" of one that has many conversations."""
        return self.speaker.session or "anonymous"

    def note_speaker(self, speaker: Speaker, *, is_side: bool) -> None:
        """Note who sends a request, which has the size of a side call or not."""
        self.client = speaker.client_name or self.client
        if not self.title or (self.has_side_title and not is_side):
            self.title, self.has_side_title = speaker.title, is_side

    def kind(self, line: Line) -> str:
        """Return the kind of `line` in this session: main, branch, sub-agent or side."""
        if line.parent is not None:
            return "branch"
        if self.is_agent:
            return "sub-agent"
        roots = [each for each in self.lines.values() if each.parent is None]
        longest = max(roots, key=lambda each: each.prompt_tokens, default=line)
        if not self.is_named or line is longest:
            return "main"
        return "side" if line.shape.is_side else "sub-agent"

    def line_report(self, line: Line, count: int) -> dict[str, Any]:
        """Return the report of a line, with its last `count` requests."""
        return {
            "line": line.number,
            "agent": self.speaker.agent,
            "client": line.about.client,
            "title": line.title,
            "begun_at": line.about.begun_at or None,
            "parent": line.parent.number if line.parent is not None else None,
            "kind": self.kind(line),
            "branch_message": line.branch_message,
            "branch_token": line.branch_token,
            "turns": line.turns,
            "tokens": len(line.tokens),
            "requests": list(line.rows)[max(0, len(line.rows) - count) :],
        }


@dataclass(frozen=True, slots=True)
class EarlierLine:
    """A line as it was when a request arrived, to compare the request with. Immutable."""

    line: Line
    shape: PromptShape
    tokens: Tokens
    prompt_tokens: int
    is_restored: bool  # what was computed of it was computed before a restart
    used_at: float  # monotonic seconds
    adapter: str
    conversation: int
    is_own: bool = False  # it is this conversation, not one that only begins alike


@dataclass(frozen=True, slots=True)
class LinePosition:
    """The line that a request extends, or else the one that it resembles most. Immutable."""

    session: Session
    shape: PromptShape
    line: Line | None  # extended
    relative: Line | None  # not extended, but made of the same messages
    links: Sequence[bytes]  # of its shape
    before: EarlierLine | None
    is_side: bool = False  # of a named session: it goes on with nothing, and is small


class ConversationLines:
    """All sessions of a worker and their lines. Owner: the SessionManager, under its lock.

    Invariants (see `check`):
      held      each line is in exactly the session that `session_of` returns
      counted   `_tokens` is the sum over the lines
      bounded   LINES_MAX lines, and TOKENS_MAX tokens if more than one line; SESSIONS_MAX sessions
                whenever one is opened (a request that ends brings its own back until then)
    """

    def __init__(self, lines_max: int, idle_s: float) -> None:
        """`lines_max` of one session; a session unused for `idle_s` is forgotten. 0 = no limit."""
        self._lines_max = lines_max
        self._idle_s = idle_s
        # Kept for one key: sessions: tokens of prompts, first words
        self._sessions: OrderedDict[tuple[str, str, str], Session] = OrderedDict()
        self._number_max = 0  # of all lines that there were
        self._lines: OrderedDict[Line, Session] = OrderedDict()  # least recently used first
        self._tokens = 0

    @property
    def sessions(self) -> list[Session]:
        """All sessions, the least recently used first."""
        return list(self._sessions.values())

    @property
    def lines(self) -> list[Line]:
        """All lines of all sessions, the least recently used first."""
        return list(self._lines)

    def check(self) -> None:
        """Assert all invariants. Costs time in proportion to what is held: for tests."""
        held = [line for session in self.sessions for line in session.lines.values()]
        assert set(held) == set(self._lines) and len(held) == len(self._lines)
        for line, session in self._lines.items():
            assert session.lines[line.number] is line, line.number
        assert self._tokens == sum(len(line.tokens) for line in held), self._tokens
        assert len(self._lines) <= LINES_MAX, len(self._lines)
        assert self._tokens <= TOKENS_MAX or len(self._lines) <= 1, self._tokens

    def session(self, speaker: Speaker, now: float) -> Session:
        """Return the speaker's session, opened where there is none. Idle ones are forgotten."""
        for key, known in list(self._sessions.items()):
            if not self._idle_s or now - known.used_at <= self._idle_s:
                break
            self._forget_session(key)
        session = self._used(Session(speaker), now)
        self._trim_sessions()
        assert len(self._sessions) <= SESSIONS_MAX, len(self._sessions)
        return session

    def restore(
        self, speaker: Speaker, loaded: Mapping[str, bytes], line: Line | None, used_at: float
    ) -> None:
        """Take up a session as it was, and a line of it, behind all that is there.

        A line whose number is taken gets another.
        """
        session = self._used(Session(speaker), used_at)
        session.loaded.update(loaded)
        if line is not None:
            if any(line.number == other.number for other in self._lines):
                line.number = self._number_max + 1
            self._number_max = max(self._number_max, line.number)
            line.conversation = line.number
            line.used_at = used_at
            self._tokens += len(line.tokens)
            self._add(line, session)
        self._trim_sessions()
        self._trim_lines()

    def snapshot(self, session: Session) -> list[EarlierLine]:
        """Return the session's lines as they are now, the latest opened last.

        Costs time by their number alone. Whoever has it needs no lock to search it, however long
        that takes.
        """
        newest = {
            line.conversation: line
            for line in sorted(session.lines.values(), key=lambda line: line.used_at)
        }
        lines = []
        for line in session.lines.values():
            # Who goes on from an end that was rewritten meanwhile is another conversation.
            number = line.conversation if newest[line.conversation] is line else 0
            lines.append(
                EarlierLine(
                    line=line,
                    shape=line.shape,
                    tokens=line.tokens,
                    prompt_tokens=line.prompt_tokens,
                    is_restored=line.is_restored,
                    used_at=line.used_at,
                    adapter=line.adapter,
                    conversation=number,
                )
            )
        return lines

    def session_of(self, line: Line) -> Session:
        """Return the session that a remembered line belongs to."""
        return self._lines[line]

    def new_number(self) -> int:
        """Return the number of another conversation, or line."""
        self._number_max += 1
        return self._number_max

    def advance(self, place: LinePosition, now: float, conversation: int) -> Line:
        """Return the line that this request's end is written to: its own, else a new one.

        Its own only where that is still remembered and extended: of two requests on one line that
        overlapped, the later to end opens a line.
        """
        session, line = self._used(place.session, now), place.line
        if line is not None and line in self._lines and line.shape.chain in place.links:
            self._lines.move_to_end(line)
            line.conversation = conversation
            return line
        known = place.line or place.relative
        parent = known if known in self._lines else None
        is_taken = any(line.number == conversation for line in self._lines)
        number = self.new_number() if is_taken else conversation
        line = Line(number, now, parent, conversation=conversation)
        if parent is not None:
            line.branch_message = parent.shape.shared_names(place.shape)
        self._add(line, session)
        return line

    def _used(self, session: Session, now: float) -> Session:
        """Return the session that its speaker has now: it may be forgotten while a request runs."""
        speaker = session.speaker
        key = (speaker.key, speaker.session, speaker.agent)
        session = self._sessions.setdefault(key, session)
        self._sessions.move_to_end(key)
        session.used_at = now
        return session

    def _add(self, line: Line, session: Session) -> None:
        session.lines[line.number] = line
        self._lines[line] = session
        while self._lines_max and len(session.lines) > self._lines_max:
            self._forget(next(each for each in self._lines if self._lines[each] is session))

    def write(self, line: Line, shape: PromptShape, tokens: Tokens, prompt_tokens: int) -> None:
        """Set what `line` holds now."""
        assert line in self._lines, line.number
        assert 0 <= prompt_tokens <= len(tokens), (prompt_tokens, len(tokens))
        self._tokens += len(tokens) - len(line.tokens)
        line.shape, line.tokens, line.prompt_tokens = shape, tokens, prompt_tokens
        line.turns += 1
        line.is_restored = False
        line.past[shape.chain] = (len(shape.names), len(tokens))
        while len(line.past) > PAST_MAX:
            line.past.popitem(last=False)
        self._trim_lines()

    def _trim_sessions(self) -> None:
        """Forget those that were not used for longest where there are too many."""
        while len(self._sessions) > SESSIONS_MAX:
            self._forget_session(next(iter(self._sessions)))

    def _trim_lines(self) -> None:
        while len(self._lines) > LINES_MAX or (self._tokens > TOKENS_MAX and len(self._lines) > 1):
            self._forget(next(iter(self._lines)))

    def _forget(self, *lines: Line) -> None:
        """Forget lines; what branched off from them hangs from what they branched off from."""
        for line in lines:
            known = self._lines.pop(line).lines.pop(line.number)
            assert known is line, line.number
            self._tokens -= len(line.tokens)
            assert self._tokens >= 0, self._tokens
        gone = set(lines)
        for other in self._lines:
            while other.parent in gone:
                other.parent = other.parent.parent

    def _forget_session(self, key: tuple[str, str, str]) -> None:
        self._forget(*self._sessions.pop(key).lines.values())

    def forget_lines(self) -> None:
        """Forget all lines; the sessions stay, with the tools that they loaded."""
        for session in self._sessions.values():
            session.lines.clear()
        self._lines.clear()
        self._tokens = 0


def first_user(shape: PromptShape) -> int:
    """Return where the first user message stands; the last message where there is none."""
    return next((at for at, role in enumerate(shape.roles) if role == "user"), len(shape.roles) - 1)


def shape_of(prompt: Prompt) -> PromptShape:
    """Return the shape of `prompt`, whose messages are all named."""
    assert len(prompt.names) == len(prompt.messages), (len(prompt.names), len(prompt.messages))
    options = prompt.thinking.options | prompt.template_kwargs
    tools = (
        (tool.get("function", {}).get("name", ""), tool)
        for tool in (*prompt.tools, *prompt.deferred)
    )
    return PromptShape(
        names=tuple(prompt.names),
        roles=tuple(message["role"] for message in prompt.messages),
        tools=tuple(map(_named, tools)),
        options=tuple(sorted(map(_named, options.items()))),
        said=frozenset(name.exact for name in prompt.names),
    )


def _named(row: tuple[str, Any]) -> tuple[str, bytes]:
    """Return a name as it is kept, and the digest of what it names."""
    name, value = row
    text = repr(value).encode("utf-8", "surrogatepass")
    return name[:NAME_CHARS_MAX], hashlib.blake2b(text, digest_size=16).digest()


# ---------------------------------------------------------------- finding a line
# What a session held at one moment is searched: that needs no lock. The costs grow with the
# messages of the request and with those of each line.


def position_in(session: Session, known: list[EarlierLine], shape: PromptShape) -> LinePosition:
    """Return which of the session's `known` lines a request goes on with. Any thread."""
    links = shape.links
    ends = {each.shape.chain: each for each in known}
    # Two conversations that share a system prompt alone are not one: without an id, the first
    # user message must be the same too.
    least = 1 if session.is_named else first_user(shape) + 1
    for count in range(len(links) - 1, least - 1, -1):
        if links[count] != links[count - 1] and links[count] in ends:
            found = ends[links[count]]
            nearest = _nearest(known, shape, found)
            before = _compared(nearest, shape, nearest is found or session.is_named)
            return LinePosition(session, shape, found.line, None, links, before)
    relative, is_alike = _relative(known, shape, session.is_named)
    if relative is None:
        is_side = (
            session.is_named and shape.is_side and not all(each.shape.is_side for each in known)
        )
        return LinePosition(session, shape, None, None, links, None, is_side)
    before = _compared(relative, shape, is_alike and session.is_named)
    return LinePosition(session, shape, None, relative.line, links, before)


def _relative(
    known: list[EarlierLine], shape: PromptShape, is_named: bool
) -> tuple[EarlierLine | None, bool]:
    """Return the line that shares most messages with this request, and whether most of them.

    Of a named session also the latest with the same system prompt and tools: one that its
    client compacted has nothing else in common.
    """
    best: EarlierLine | None = None
    nearest, said = NOT_NEAR, shape.said
    for each in reversed(known):
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


def _compared(known: EarlierLine, shape: PromptShape, is_own: bool) -> EarlierLine:
    """Return `known`, to be compared with a request; its own if both begin with one question."""
    ours = shape.names[: first_user(shape) + 1]
    begins_alike = bool(ours) and ours == known.shape.names[: len(ours)]
    return replace(known, is_own=is_own or begins_alike)


def _nearest(known: list[EarlierLine], shape: PromptShape, found: EarlierLine) -> EarlierLine:
    """Return the line that is nearest to a request that extends `found`.

    What was edited may stand in another, of which that line is a shorter state. That one has
    messages of the request that `found` has not, which a request that only appends shows of no
    other.
    """
    new = shape.said - found.shape.said
    others = [each for each in known if not new.isdisjoint(each.shape.said)]
    return max([found, *others], key=lambda each: _nearness(each.shape, shape))


def _nearness(theirs: PromptShape, shape: PromptShape) -> tuple[int, bool, int]:
    """Return how near a line is: messages that both have, the same tools, the same beginning."""
    shared = len(theirs.said & shape.said)
    return shared, theirs.tools == shape.tools, theirs.shared_names(shape)
