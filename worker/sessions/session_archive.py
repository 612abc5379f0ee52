"""Keeps turns and sessions on disk, so that they outlive the worker, however it ends.

A record is what one request left: its turn, its line, its session. Of a line that the file holds
already only what came to it is written. Prompts and answers stand here (shared/durable_journal.py
says how they are kept private), an API key only as `SessionArchive.owner` has it.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import numpy as np

from hearth.shared.durable_journal import open_journal_writer
from hearth.shared.wire_messages import START, MessageName, Speaker, linked
from hearth.worker.cache.block_hash import Tokens, common_length
from hearth.worker.prompt.turn_beginnings import Beginning
from hearth.worker.sessions.conversation_lines import (
    PAST_MAX,
    Line,
    LineFacts,
    PromptShape,
    new_uid,
)
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.thinking_store import thinking_key
from hearth.worker.sessions.turn_store import Turn

SCHEMA: Final = 1
WRITTEN_MAX: Final = 4_096  # lines that are known to stand in the file

ArchiveRow = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LineState:
    """A line as it is at one moment, and, where it has just grown, as it was before that.

    Immutable.
    """

    uid: bytes
    number: int
    parent: bytes  # uid; b"" where there is none
    branch_message: int
    branch_token: int
    turns: int
    shape: PromptShape
    tokens: Tokens
    prompt_tokens: int
    past: tuple[tuple[bytes, tuple[int, int]], ...]
    rows: tuple[ArchiveRow, ...]
    about: LineFacts = LineFacts()
    before: tuple[PromptShape, Tokens] | None = None
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """The part of a session that one request leaves behind, or one part of all. Immutable."""

    at: float  # wall clock, in seconds: when it was last used
    speaker: Speaker | None = None
    loaded: Mapping[str, bytes] | None = None  # of the session, with `speaker`
    line: LineState | None = None  # of the session
    turn: Turn | None = None
    thinking: tuple[bytes, str] | None = None  # by healing key, where no turn brings it
    forgets: bool = False  # the lines that were there at this moment

    @property
    def nbytes(self) -> int:
        """Return about how much memory it keeps from being freed."""
        line = 4 * len(self.line.tokens) if self.line is not None else 0
        return line + (self.turn.nbytes if self.turn is not None else 0) + 2_048


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A session, and one of its lines, as they were when they were last used. Immutable."""

    at: float
    speaker: Speaker
    loaded: dict[str, bytes]
    line: Line | None


@dataclass(frozen=True, slots=True)
class Remembered:
    """All that was remembered, in the order of its last use. Immutable."""

    turns: list[Turn]
    thinking: list[tuple[bytes, str]]
    sessions: list[SavedSession]


class SessionArchive:
    """Reads what earlier workers left, once, and writes what is to be left.

    Any thread may call it. Invariant: `load` comes once, and before anything is added.
    """

    def __init__(
        self, directory: Path | None, everything: Callable[[], Iterable[ArchiveEntry]]
    ) -> None:
        """`everything` returns all that is remembered, on another thread.

        Without a directory nothing is written.
        """
        self._may_load = True
        # Kept for one key: journals of turns, thinking and sessions
        self.records = RecordWriter(everything)
        self.journal = open_journal_writer(directory, self.records, SCHEMA)
        self._lost: Counter[str] = Counter()

    def owner(self, key: str) -> str:
        """Return what a digest of an API key is known by: it can't be found by trying keys."""
        return self.journal.named(key)

    def load(self) -> Remembered:
        """Return what was remembered. Once, before anything is added."""
        assert self._may_load, "the journal is read once, before it is written"
        self._may_load = False
        reader = RecordReader(self._lost)
        for file, record in self.journal.read():
            reader.take(file, record)
        return reader.memory()

    def add(self, entry: ArchiveEntry) -> None:
        """Have `entry` written. Never blocks."""
        self._may_load = False
        self.journal.put(entry, entry.nbytes)

    def close(self) -> None:
        """Write what waits, within hearth.shared.durable_journal.CLOSE_WAIT_S_MAX. Once."""
        self.journal.close()

    def report(self) -> dict[str, int]:
        """Return the counters of what was written, and of what could not be read."""
        return {**self._lost, **self.journal.report()}


def state_of(line: Line, before: tuple[PromptShape, Tokens] | None = None) -> LineState:
    """Return the line as it is now; `before` is what it was before its last request."""
    assert line.shape is not None and line.tokens is not None, "a line is written when it is opened"
    return LineState(
        uid=line.uid,
        number=line.number,
        parent=line.parent.uid if line.parent is not None else b"",
        branch_message=line.branch_message,
        branch_token=line.branch_token,
        turns=line.turns,
        shape=line.shape,
        tokens=line.tokens,
        prompt_tokens=line.prompt_tokens,
        past=tuple(line.past.items()),
        rows=tuple(line.rows),
        about=line.about,
        before=before,
        adapter=line.adapter,
    )


def entries(
    turns: Iterable[Turn],
    thinking: Iterable[tuple[bytes, str]],
    sessions: Iterable[tuple[Speaker, dict[str, bytes], float, Iterable[tuple[float, LineState]]]],
) -> Iterator[ArchiveEntry]:
    """Yield all that is remembered. Of sessions and lines the monotonic clock's times are given."""
    ahead = time.time() - time.monotonic()
    for speaker, loaded, used_at, lines in sessions:
        yield ArchiveEntry(used_at + ahead, speaker, loaded)
        for line_used_at, line in lines:
            yield ArchiveEntry(line_used_at + ahead, speaker, loaded, line)
    brought: dict[bytes, str] = {}
    for turn in turns:
        if turn.said.reasoning:
            brought[thinking_key(turn.key, turn.place, turn.said)] = turn.said.reasoning
        yield ArchiveEntry(turn.made_at, turn=turn)
    for name, text in thinking:
        if brought.get(name) != text:
            yield ArchiveEntry(0.0, thinking=(name, text))


# ---------------------------------------------------------------- writing


class RecordWriter:
    """Makes records of entries. Owner: the journal writer's thread.

    Invariant: a record has a part of a line only where the rest stands in an earlier record.
    """

    def __init__(self, everything: Callable[[], Iterable[ArchiveEntry]]) -> None:
        self.everything = everything
        # Kept for nobody: which lines the journal has
        self._written: OrderedDict[bytes, int] = OrderedDict()  # uid of a line -> its turns

    def lost(self) -> None:
        """Have every line written whole the next time."""
        self._written.clear()

    def record(self, entry: ArchiveEntry) -> ArchiveRow:
        """Return what is written of `entry`."""
        row: ArchiveRow = {"at": entry.at}
        if entry.speaker is not None:
            row["session"] = [*_speaker_row(entry.speaker), dict(entry.loaded or {})]
        if entry.line is not None:
            row["line"] = self._line(entry.line)
        if entry.turn is not None:
            row["turn"] = _turn_row(entry.turn)
        if entry.thinking is not None:
            row["thinking"] = list(entry.thinking)
        if entry.forgets:
            row["forgets"] = True
        return row

    def _line(self, line: LineState) -> ArchiveRow:
        """Return the line's row, without the part that an earlier record has."""
        is_known = self._written.get(line.uid) == line.turns - 1
        before = line.before if is_known else None
        self._written[line.uid] = line.turns
        self._written.move_to_end(line.uid)
        if len(self._written) > WRITTEN_MAX:
            self._written.popitem(last=False)
        shape, names, tokens = line.shape, 0, 0
        if before is not None:
            names = _shared_names(before[0], shape)
            tokens = common_length(before[1], line.tokens)
        same = before[0] if before is not None else None
        return {
            "uid": line.uid,
            "number": line.number,
            "parent": line.parent,
            "branch": [line.branch_message, line.branch_token],
            "turns": line.turns,
            "is_more": before is not None,  # than the line's last record
            "names_kept": names,
            "names": [[each.canonical, each.exact, each.rules] for each in shape.names[names:]],
            "roles": shape.roles[names:],
            "tools": None if same and same.tools == shape.tools else shape.tools,
            "chain": shape.chain,  # for earlier versions
            "options": None if same and same.options == shape.options else shape.options,
            "tokens_kept": tokens,
            "tokens": _octets(line.tokens[tokens:]),
            "prompt_tokens": line.prompt_tokens,
            "past": None if before is not None else [[a, b, c] for a, (b, c) in line.past],
            "rows": line.rows[-1:] if before is not None else line.rows,
            "adapter": line.adapter,
            "about": list(astuple(line.about)),
        }


def _shared_names(one: PromptShape, other: PromptShape) -> int:
    """Return how many messages both begin with, exactly the same."""
    rows = zip(one.names, other.names, one.roles, other.roles, strict=False)
    return sum(1 for _ in takewhile(lambda row: row[0] == row[1] and row[2] == row[3], rows))


def _turn_row(turn: Turn) -> list[Any]:
    said = turn.said
    calls = [[name, arguments] for name, arguments in said.calls]
    words = [said.reasoning, said.content, calls, turn.text]
    return [
        turn.key,
        turn.place,
        _octets(turn.ids),
        *words,
        turn.call_ids,
        turn.signature,
        turn.made_at,
        turn.begins,
    ]


def _speaker_row(speaker: Speaker) -> list[str]:
    return [speaker.key, speaker.session, speaker.agent, speaker.parent]


def _octets(tokens: Tokens) -> bytes:
    return tokens.astype("<i4").tobytes()


# ---------------------------------------------------------------- reading


class RecordReader:
    """Puts together what records say. Owner: the thread that starts the worker; used once."""

    def __init__(self, counts: "Counter[str]") -> None:
        """`counts` counts what could not be read."""
        self._counts = counts
        self._turns: list[Turn] = []
        self._thinking: dict[bytes, str] = {}
        self._sessions: dict[Speaker, tuple[float, dict[str, bytes]]] = {}
        self._lines: dict[tuple[int, bytes], tuple[Line, bytes, Speaker]] = {}
        self._forgotten_at = 0.0

    def take(self, file: int, record: Any) -> None:
        """Take the next record of a file. One that is not ours is counted."""
        try:
            self._take(file, record)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            self._counts["records_odd"] += 1

    def _take(self, file: int, record: ArchiveRow) -> None:
        at = float(record["at"])
        if "turn" in record:
            self._turns.append(_turn(record["turn"]))
        if "thinking" in record:
            name, text = record["thinking"]
            self._thinking.pop(name, None)
            self._thinking[name] = text
        if record.get("forgets"):
            self._forgotten_at = max(self._forgotten_at, at)
        if "session" in record:
            key, session, agent, parent, loaded = record["session"]
            speaker = Speaker(key, session, agent, parent)
            known = self._sessions.get(speaker)
            if known is None or known[0] <= at:
                self._sessions[speaker] = (at, dict(loaded))
            if "line" in record:
                self._take_line(file, record["line"], speaker, at)

    def _take_line(self, file: int, row: ArchiveRow, speaker: Speaker, at: float) -> None:
        place = (file, row["uid"])
        line, _, _ = self._lines.get(place, (None, b"", speaker))
        if row["is_more"]:
            if line is None or line.turns != row["turns"] - 1:
                is_again = line is not None and line.turns >= row["turns"]
                self._counts["lines_broken"] += not is_again
                return
        else:
            line = Line(row["number"], at, uid=row["uid"], is_restored=True)
        _grow(line, row)
        line.used_at = at
        self._lines[place] = (line, row["parent"], speaker)

    def memory(self) -> Remembered:
        """Return all of it, each thing once, what was used last behind all else."""
        lines = self._merged()
        rows = [SavedSession(line.used_at, speaker, {}, line) for line, _, speaker in lines]
        for speaker, (at, loaded) in self._sessions.items():
            rows.append(SavedSession(at, speaker, loaded, None))
        rows.sort(key=lambda row: row.at)
        # A turn is used by each request of its line.
        used: dict[tuple[str, bytes], float] = {}
        for line, _, speaker in lines:
            for link in line.shape.links if line.shape is not None else ():
                place = (speaker.key, link)
                used[place] = max(used.get(place, 0.0), line.used_at)
        turns = sorted(
            self._turns, key=lambda turn: max(turn.made_at, used.get((turn.key, turn.place), 0.0))
        )
        return Remembered(turns, list(self._thinking.items()), rows)

    def _merged(self) -> list[tuple[Line, bytes, Speaker]]:
        """Return the lines: of two files' versions of one the later, both where it was forked."""
        rows = [row for row in self._lines.values() if row[0].used_at > self._forgotten_at]
        rows.sort(key=lambda row: row[0].used_at, reverse=True)
        versions: dict[bytes, list[Line]] = {}
        kept = []
        for row in rows:
            line, known = row[0], versions.setdefault(row[0].uid, [])
            assert line.shape is not None, "_grow sets it"
            if not any(line.shape.chain in other.past for other in known):
                known.append(line)
                kept.append(row)
        for line, parent, _ in kept:
            line.parent = next(iter(versions.get(parent, ())), None)
        for each in versions.values():
            for fork in each[1:]:
                fork.uid = new_uid()
        return kept


def _grow(line: Line, row: ArchiveRow) -> None:
    """Bring `line` to where `row` has it."""
    was = line.shape if row["is_more"] else None
    kept = was.names[: row["names_kept"]] if was is not None else ()
    rows = (MessageName(*each) for each in row["names"])
    names = (*kept, *linked(rows, kept[-1].link if kept else START))
    tokens = _tokens(row["tokens"])
    if row["tokens_kept"]:
        if line.tokens is None:
            raise ValueError("a record goes on with a line that is not there")
        tokens = np.concatenate([line.tokens[: row["tokens_kept"]], tokens])
    line.shape = PromptShape(
        names=names,
        roles=(*(was.roles if was is not None else ())[: len(kept)], *row["roles"]),
        tools=_pairs(row["tools"]) if was is None or row["tools"] is not None else was.tools,
        options=_pairs(row["options"])
        if was is None or row["options"] is not None
        else was.options,
        said=frozenset(name.exact for name in names),
    )
    line.tokens, line.prompt_tokens, line.turns = tokens, row["prompt_tokens"], row["turns"]
    line.number, (line.branch_message, line.branch_token) = row["number"], row["branch"]
    line.adapter = row.get("adapter", "")  # older records have none
    for chain, messages, count in row["past"] or ():
        line.past[chain] = (messages, count)
    line.past[line.shape.chain] = (len(names), len(tokens))
    while len(line.past) > PAST_MAX:
        line.past.popitem(last=False)
    line.rows.extend(row["rows"])
    if "about" in row:  # records of earlier versions lack it
        line.about = LineFacts(*row["about"])


def _turn(row: list[Any]) -> Turn:
    # Older records do not tell what the turn was sampled behind.
    key, place, ids, reasoning, content, calls, text, call_ids, signature, made_at, *rest = row
    said = TurnContent(reasoning, content, tuple((name, arguments) for name, arguments in calls))
    begins = Beginning(*rest[0]) if any(rest) else None
    return Turn(key, place, _tokens(ids), said, text, tuple(call_ids), signature, made_at, begins)


def _tokens(octets: bytes) -> Tokens:
    return np.frombuffer(octets, dtype="<i4").astype(np.int32)


def _pairs(rows: Iterable[Any]) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, digest) for name, digest in rows)
