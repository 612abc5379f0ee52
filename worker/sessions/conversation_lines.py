"""Keeps the conversations of each session as lines, and finds the line that a request extends.

A line is a conversation that only grows. A request whose messages begin with all messages of a line
extends that line. Any other request opens a new line, so that a sub-agent never overwrites the
line of its orchestrator. This module does not decide which KV is valid.
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
LINES_MAX = 512  # lines of all sessions together
TOKENS_MAX = 32_000_000  # tokens of all lines together: 128 MB
PAST_MAX = 256  # remembered requests per line, by which the archive finds later versions
REQUESTS_MAX = 64  # trace records kept per line
SIDE_MESSAGES_MAX = 4  # most messages of a title request, a topic check or a quota probe

NAME_CHARS_MAX = 80  # most characters of a tool's or option's name, in memory and in reports

UID_BYTES = 8
# A request that repeats more than this share of a line's messages was made from that line.
OVERLAP_MIN = 0.5
NOT_NEAR = (0, False, 0)


@dataclass(frozen=True, slots=True)
class PromptShape:
    """The digests of a prompt, from which a later change can be found. Immutable."""

    names: tuple[MessageName, ...] = ()
    roles: tuple[str, ...] = ()
    tools: tuple[tuple[str, bytes], ...] = ()  # (name, digest) in the client's order
    options: tuple[tuple[str, bytes], ...] = ()  # template options: (name, digest)
    message_digests: frozenset[bytes] = frozenset()  # exact digests of all messages

    @property
    def chain(self) -> bytes:
        """The link that covers all messages."""
        return self.names[-1].link if self.names else START

    @property
    def links(self) -> list[bytes]:
        """The link before each message, then the link that covers all messages."""
        return [START, *(name.link for name in self.names)]

    def shared_names(self, other: "PromptShape") -> int:
        """Return how many messages at the beginning are canonically equal in both prompts."""
        pairs = zip(self.names, other.names, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0].link == pair[1].link, pairs))

    @property
    def is_side(self) -> bool:
        """Whether the prompt is as small as a side call's: few messages and no tools."""
        return not self.tools and len(self.names) <= SIDE_MESSAGES_MAX


@dataclass(frozen=True, slots=True)
class LineFacts:
    """The facts about a line in reports, except the title, which stays in memory. Immutable."""

    label: str = ""  # label of the session in reports
    client: str = ""  # readable name of the program that sent the last request
    begun_at: float = 0.0  # time of the first request in seconds, by wall clock; 0 = unknown
    lost: int = 0  # tokens lost by all requests of the line
    decode_speed: float | None = None  # tokens per second of the last measured answer


@dataclass(eq=False, slots=True)
class Line:
    """One conversation line. `shape` and `tokens` are the last request's, answer included.

    Until the first request is written to the line, `shape` and `tokens` are empty.

    `number` is shown in reports, and unique in one worker at a time; `uid` never changes.
    `conversation` is the number of the conversation that the last request's tokens continue, mostly
    the number of the conversation's first line. KV is ranked and reported by `conversation`.
    `past` maps the chain of each earlier request to the request's numbers of messages and tokens.
    Owner: the ConversationLines that hold the line.
    """

    number: int
    used_at: float
    parent: "Line | None" = field(default=None, repr=False)
    branch_message: int = 0  # index of the first message that differs from the parent's
    branch_token: int = 0
    shape: PromptShape = PromptShape()
    tokens: Tokens = field(default_factory=lambda: pack([]), repr=False)
    prompt_tokens: int = 0  # number of tokens of the prompt, at the beginning of `tokens`
    turns: int = 0
    past: OrderedDict[bytes, tuple[int, int]] = field(default_factory=OrderedDict, repr=False)
    rows: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=REQUESTS_MAX))
    uid: bytes = field(default_factory=lambda: secrets.token_bytes(UID_BYTES))
    is_restored: bool = False  # whether an earlier worker left the line, without a request since
    adapter: str = ""  # the model's adapter for the last request
    facts: LineFacts = LineFacts()
    title: str = field(default="", repr=False)  # words of the first question, kept in memory only
    conversation: int = 0

    def copy(self) -> "Line":
        """Return a copy that later requests do not change."""
        return replace(self, past=self.past.copy(), rows=self.rows.copy())


@dataclass(eq=False, slots=True)
class Session:
    """All lines of one speaker. All speakers without a session id share one session.

    In the shared session, a conversation that moves from one client to another still finds its
    line. Reports separate the lines of the shared session by label.
    Owner: the ConversationLines that hold the session.
    """

    speaker: Speaker
    lines: dict[int, Line] = field(default_factory=dict)
    client: str = ""  # readable name of the program that sent the last request
    title: str = field(default="", repr=False)  # title of the first request that is no side call
    has_side_title: bool = False  # whether the title comes from a side call for now
    loaded: dict[str, bytes] = field(default_factory=dict)  # deferred tool -> first question
    used_at: float = 0.0

    @property
    def is_named(self) -> bool:
        return bool(self.speaker.session)

    @property
    def is_agent(self) -> bool:
        """Whether the client says that it works for another agent."""
        return bool(self.speaker.agent or self.speaker.parent)

    @property
    def label(self) -> str:
        """The session's name in reports; "anonymous" for the session without an id."""
        return self.speaker.session or "anonymous"

    def record_speaker(self, speaker: Speaker, *, is_side: bool) -> None:
        """Record who sends a request, and whether it has the size of a side call."""
        self.client = speaker.client_name or self.client
        if not self.title or (self.has_side_title and not is_side):
            self.title, self.has_side_title = speaker.title, is_side

    def kind(self, line: Line) -> str:
        """Return the kind of `line` in this session: main, branch, sub-agent or side."""
        if line.parent is not None:
            return "branch"
        if self.is_agent:
            return "sub-agent"
        roots = [root for root in self.lines.values() if root.parent is None]
        longest = max(roots, key=lambda root: root.prompt_tokens, default=line)
        if not self.is_named or line is longest:
            return "main"
        return "side" if line.shape.is_side else "sub-agent"

    def line_report(self, line: Line, count: int) -> dict[str, Any]:
        """Return the report of `line`, with the last `count` requests of the line."""
        return {
            "line": line.number,
            "agent": self.speaker.agent,
            "client": line.facts.client,
            "title": line.title,
            "begun_at": line.facts.begun_at or None,
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
    """A line at the time when a request arrived, for comparison with the request. Immutable."""

    line: Line
    shape: PromptShape
    tokens: Tokens
    prompt_tokens: int
    is_restored: bool  # whether the line is from before a restart
    used_at: float  # time of the last use, in monotonic seconds
    adapter: str
    conversation: int
    is_own: bool = False  # whether this is the request's conversation, not just a similar one


@dataclass(frozen=True, slots=True)
class LineMatch:
    """The line that a request extends, or else the most similar line. Immutable."""

    session: Session
    shape: PromptShape
    line: Line | None  # the line that the request extends
    similar: Line | None  # a line with the same messages that the request does not extend
    links: Sequence[bytes]  # links of `shape`
    earlier: EarlierLine | None
    is_side: bool = False  # whether this is a small request of a named session, without a line


class ConversationLines:
    """All sessions of a worker and their lines. Owner: the SessionManager, under its lock.

    Invariants (see `check`):
      held      each line is in exactly the session that `session_of` returns
      counted   `_tokens` is the sum over the lines
      bounded   there are at most LINES_MAX lines, with at most TOKENS_MAX tokens unless there is
                only one line, and at most SESSIONS_MAX sessions whenever a session is opened (the
                end of a request may bring back the request's session before that)
    """

    def __init__(self, lines_max: int, idle_s: float) -> None:
        """A session keeps at most `lines_max` lines, and is forgotten after `idle_s` without use.

        0 = no limit.
        """
        self._lines_max = lines_max
        self._idle_s = idle_s
        # Kept for one key: tokens and first words of the prompts of sessions
        self._sessions: OrderedDict[tuple[str, str, str], Session] = OrderedDict()
        self._number_max = 0  # highest number given out
        self._lines: OrderedDict[Line, Session] = OrderedDict()  # least recently used first
        self._tokens = 0

    @property
    def sessions(self) -> list[Session]:
        """All sessions, least recently used first."""
        return list(self._sessions.values())

    @property
    def lines(self) -> list[Line]:
        """All lines of all sessions, least recently used first."""
        return list(self._lines)

    def check(self) -> None:
        """Assert all invariants. For tests, as the check takes time for every line."""
        lines = [line for session in self.sessions for line in session.lines.values()]
        assert set(lines) == set(self._lines) and len(lines) == len(self._lines)
        for line, session in self._lines.items():
            assert session.lines[line.number] is line, line.number
        assert self._tokens == sum(len(line.tokens) for line in lines), self._tokens
        assert len(self._lines) <= LINES_MAX, len(self._lines)
        assert self._tokens <= TOKENS_MAX or len(self._lines) <= 1, self._tokens

    def session(self, speaker: Speaker, now: float) -> Session:
        """Return the speaker's session, opened if needed. Idle sessions are forgotten."""
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
        """Restore a session and one of its lines; both then count as used last.

        A line whose number is taken gets another number.
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
        """Return the session's lines as they are now, the line opened last at the end.

        The time grows only with the number of lines. The result can be searched without the lock.
        """
        newest = {
            line.conversation: line
            for line in sorted(session.lines.values(), key=lambda line: line.used_at)
        }
        lines = []
        for line in session.lines.values():
            # If a newer line continues the conversation, a request that extends this line does not.
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
        """Return an unused number for a conversation or line."""
        self._number_max += 1
        return self._number_max

    def advance(self, line_match: LineMatch, now: float, conversation: int) -> Line:
        """Return the line to which this request's end is written: the extended line or a new line.

        The extended line is taken if it is remembered and the request still extends it. Of two
        overlapping requests on one line, the request that ends later opens a new line.
        """
        session, line = self._used(line_match.session, now), line_match.line
        if line is not None and line in self._lines and line.shape.chain in line_match.links:
            self._lines.move_to_end(line)
            line.conversation = conversation
            return line
        known = line_match.line or line_match.similar
        parent = known if known in self._lines else None
        is_taken = any(line.number == conversation for line in self._lines)
        number = self.new_number() if is_taken else conversation
        line = Line(number, now, parent, conversation=conversation)
        if parent is not None:
            line.branch_message = parent.shape.shared_names(line_match.shape)
        self._add(line, session)
        return line

    def _used(self, session: Session, now: float) -> Session:
        """Return the speaker's session, marked as used now.

        A session that was forgotten while the request ran is kept again.
        """
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
            self._forget(next(line for line in self._lines if self._lines[line] is session))

    def write(self, line: Line, shape: PromptShape, tokens: Tokens, prompt_tokens: int) -> None:
        """Set the prompt and the tokens of `line`."""
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
        """Forget the least recently used sessions beyond SESSIONS_MAX."""
        while len(self._sessions) > SESSIONS_MAX:
            self._forget_session(next(iter(self._sessions)))

    def _trim_lines(self) -> None:
        while len(self._lines) > LINES_MAX or (self._tokens > TOKENS_MAX and len(self._lines) > 1):
            self._forget(next(iter(self._lines)))

    def _forget(self, *lines: Line) -> None:
        """Forget lines; branches of a forgotten line become branches of that line's parent."""
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
        """Forget all lines; the sessions and their loaded tools stay."""
        for session in self._sessions.values():
            session.lines.clear()
        self._lines.clear()
        self._tokens = 0


def first_user(shape: PromptShape) -> int:
    """Return the index of the first user message, or of the last message if there is none."""
    return next((at for at, role in enumerate(shape.roles) if role == "user"), len(shape.roles) - 1)


def shape_of(prompt: Prompt) -> PromptShape:
    """Return the shape of `prompt`, all of whose messages have names."""
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
        message_digests=frozenset(name.exact for name in prompt.names),
    )


def _named(item: tuple[str, Any]) -> tuple[str, bytes]:
    """Return the shortened name and the digest of the value."""
    name, value = item
    text = repr(value).encode("utf-8", "surrogatepass")
    return name[:NAME_CHARS_MAX], hashlib.blake2b(text, digest_size=16).digest()


# ---------------------------------------------------------------- finding a line
# The search reads a snapshot of a session's lines, so no lock is needed. The time grows with the
# number of messages in the request and in each line.


def match_line(session: Session, known: list[EarlierLine], shape: PromptShape) -> LineMatch:
    """Return which of the session's `known` lines a request extends or resembles. Any thread."""
    links = shape.links
    line_by_chain = {line.shape.chain: line for line in known}
    # A shared system prompt alone does not make one conversation. Without a session id, the first
    # user message must be the same too.
    least = 1 if session.is_named else first_user(shape) + 1
    for count in range(len(links) - 1, least - 1, -1):
        if links[count] != links[count - 1] and links[count] in line_by_chain:
            found = line_by_chain[links[count]]
            nearest = _nearest(known, shape, found)
            before = _compared(nearest, shape, nearest is found or session.is_named)
            return LineMatch(session, shape, found.line, None, links, before)
    similar, is_alike = _most_similar(known, shape, session.is_named)
    if similar is None:
        is_side = (
            session.is_named and shape.is_side and not all(line.shape.is_side for line in known)
        )
        return LineMatch(session, shape, None, None, links, None, is_side)
    before = _compared(similar, shape, is_alike and session.is_named)
    return LineMatch(session, shape, None, similar.line, links, before)


def _most_similar(
    known: list[EarlierLine], shape: PromptShape, is_named: bool
) -> tuple[EarlierLine | None, bool]:
    """Return the line that shares most messages with this request, and whether it shares many.

    In a named session, the latest line with the same system prompt and tools also counts: a client
    that compacts a conversation keeps only system prompt and tools.
    """
    best: EarlierLine | None = None
    nearest, digests = NOT_NEAR, shape.message_digests
    for line in reversed(known):
        line_shape = line.shape
        if not line_shape.names:
            continue
        shared = len(line_shape.message_digests & digests)
        share = shared / max(1, min(len(line_shape.message_digests), len(digests)))
        has_head = bool(shape.names) and line_shape.names[0].exact == shape.names[0].exact
        is_alike = (is_named or has_head) and shared > 1 and share > OVERLAP_MIN
        if is_alike and _nearness(line_shape, shape) > nearest:
            best, nearest = line, _nearness(line_shape, shape)
        elif best is None and is_named and has_head and line_shape.tools == shape.tools:
            best = line
    return best, nearest > NOT_NEAR


def _compared(known: EarlierLine, shape: PromptShape, is_own: bool) -> EarlierLine:
    """Return `known` for comparison; a line with the same first question counts as own."""
    opening = shape.names[: first_user(shape) + 1]
    begins_alike = bool(opening) and opening == known.shape.names[: len(opening)]
    return replace(known, is_own=is_own or begins_alike)


def _nearest(known: list[EarlierLine], shape: PromptShape, found: EarlierLine) -> EarlierLine:
    """Return the line nearest to a request that extends `found`.

    An edited conversation may continue in another line, and `found` may be an earlier state of that
    line. The other line then holds messages of the request that `found` lacks. If a request only
    appends, no line has the new messages.
    """
    new = shape.message_digests - found.shape.message_digests
    others = [line for line in known if not new.isdisjoint(line.shape.message_digests)]
    return max([found, *others], key=lambda line: _nearness(line.shape, shape))


def _nearness(line_shape: PromptShape, shape: PromptShape) -> tuple[int, bool, int]:
    """Return how near a line is: (shared messages, same tools?, length of the same beginning)."""
    shared = len(line_shape.message_digests & shape.message_digests)
    return shared, line_shape.tools == shape.tools, line_shape.shared_names(shape)
