"""Keeps turns and sessions on disk, so that they outlive the worker, however it ends.

A record is what one request left: its turn, its line, its session. Of a line that the file holds
already only what came to it is written. Prompts and answers stand here (shared/durable_journal.py
says how they are kept private), an API key only as the journal names it: it can't be found by
trying keys.
"""

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import numpy as np

from hearth.shared.durable_journal import open_journal_writer
from hearth.shared.wire_messages import START, MessageName, Speaker, linked
from hearth.worker.cache.block_hash import Tokens, common_length
from hearth.worker.prompt.prompt_with_sampled_turns import Beginning
from hearth.worker.sessions.conversation_lines import (
    PAST_MAX,
    UID_BYTES,
    Line,
    LineFacts,
    PromptShape,
)
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.turn_store import Turn

SCHEMA: Final = 1
WRITTEN_MAX: Final = 4_096  # lines that are known to stand in the file

ArchiveRow = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """The part of a session that one request leaves behind, or one part of all. Immutable."""

    at: float  # wall clock, in seconds: when it was last used
    speaker: Speaker | None = None
    loaded: Mapping[str, bytes] | None = None  # of the session, with `speaker`
    line: Line | None = None  # of the session: a copy that stays as it is
    before: tuple[PromptShape, Tokens] | None = None  # of a line that has just grown
    turn: Turn | None = None
    thinking: tuple[bytes, str] | None = None  # by healing key, where no turn brings it
    forgets: bool = False  # the lines that were there at this moment

    @property
    def nbytes(self) -> int:
        """Return about how much memory it keeps from being freed."""
        line = 4 * len(self.line.tokens) if self.line is not None else 0
        return line + (self.turn.nbytes if self.turn is not None else 0) + 2_048


class SessionArchive:
    """Reads what earlier workers left, once, and writes what is to be left.

    Any thread may call it, but for what makes records: that is the journal writer's thread.
    Invariants: `load` comes once, and before anything is added; a record has a part of a line only
    where the rest stands in an earlier record.
    """

    def __init__(
        self, directory: Path | None, everything: Callable[[], Iterable[ArchiveEntry]]
    ) -> None:
        """`everything` returns all that is remembered, on another thread.

        Without a directory nothing is written.
        """
        self._may_load = True
        self.everything = everything
        # Kept for nobody: which lines the journal has
        self._written: OrderedDict[bytes, int] = OrderedDict()  # uid of a line -> its turns
        self._lost: Counter[str] = Counter()
        # Kept for one key: journals of turns, thinking and sessions
        self.journal = open_journal_writer(directory, self, SCHEMA)

    def load(self) -> list[ArchiveEntry]:
        """Return what was remembered, in the order of its last use, each thing once.

        Once, before anything is added. A record that is not ours is counted.
        """
        assert self._may_load, "the journal is read once, before it is written"
        self._may_load = False
        reader = RecordReader(self._lost)
        for file, record in self.journal.read():
            try:
                reader.take(file, record)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError):
                self._lost["records_odd"] += 1
        return reader.memory()

    def add(self, entry: ArchiveEntry) -> None:
        """Have `entry` written. Never blocks."""
        self._may_load = False
        self.journal.put(entry, entry.nbytes)

    def report(self) -> dict[str, int]:
        """Return the counters of what was written, and of what could not be read."""
        return {**self._lost, **self.journal.report()}

    # ------------------------------------------------------------ the journal writer's thread

    def lost(self) -> None:
        """Have every line written whole the next time."""
        self._written.clear()

    def record(self, entry: ArchiveEntry) -> ArchiveRow:
        """Return what is written of `entry`."""
        row: ArchiveRow = {"at": entry.at}
        if (who := entry.speaker) is not None:
            loaded = dict(entry.loaded or {})
            row["session"] = [who.key, who.session, who.agent, who.parent, loaded]
        if entry.line is not None:
            row["line"] = self._line(entry.line, entry.before)
        if (turn := entry.turn) is not None:
            said, calls = turn.said, [[name, arguments] for name, arguments in turn.said.calls]
            words: list[Any] = [said.reasoning, said.content, calls, turn.text]
            given = [turn.call_ids, turn.signature, turn.made_at, turn.begins]
            row["turn"] = [turn.api_key, turn.place, _octets(turn.ids), *words, *given]
        if entry.thinking is not None:
            row["thinking"] = list(entry.thinking)
        if entry.forgets:
            row["forgets"] = True
        return row

    def _line(self, line: Line, before: tuple[PromptShape, Tokens] | None) -> ArchiveRow:
        """Return the line's row, without the part of it as it was `before` that a record has."""
        if self._written.get(line.uid) != line.turns - 1:
            before = None
        self._written[line.uid] = line.turns
        self._written.move_to_end(line.uid)
        if len(self._written) > WRITTEN_MAX:
            self._written.popitem(last=False)
        shape, rows = line.shape, list(line.rows)
        was, had = before or (PromptShape(), line.tokens[:0])
        pairs = zip(was.names, shape.names, was.roles, shape.roles, strict=False)
        same = takewhile(lambda row: row[0] == row[1] and row[2] == row[3], pairs)
        names = sum(1 for _ in same)
        tokens = common_length(had, line.tokens)
        return {
            "uid": line.uid,
            "number": line.number,
            "parent": line.parent.uid if line.parent is not None else b"",
            "branch": [line.branch_message, line.branch_token],
            "turns": line.turns,
            "is_more": before is not None,  # than the line's last record
            "names_kept": names,
            "names": [[each.canonical, each.exact, each.rules] for each in shape.names[names:]],
            "roles": shape.roles[names:],
            "tools": None if before and was.tools == shape.tools else shape.tools,
            "chain": shape.chain,  # for earlier versions
            "options": None if before and was.options == shape.options else shape.options,
            "tokens_kept": tokens,
            "tokens": _octets(line.tokens[tokens:]),
            "prompt_tokens": line.prompt_tokens,
            "past": None if before else [[a, b, c] for a, (b, c) in line.past.items()],
            "rows": rows[-1:] if before else rows,
            "adapter": line.adapter,
            "about": list(astuple(line.about)),
        }


def _octets(tokens: Tokens) -> bytes:
    return tokens.astype("<i4").tobytes()


# ---------------------------------------------------------------- reading


class RecordReader:
    """Puts together what records say. Owner: the thread that starts the worker; used once."""

    def __init__(self, counts: Counter[str]) -> None:
        """`counts` counts what could not be read."""
        self._counts = counts
        self._turns: list[Turn] = []
        self._thinking: dict[bytes, str] = {}
        self._sessions: dict[Speaker, tuple[float, dict[str, bytes]]] = {}
        self._lines: dict[tuple[int, bytes], tuple[Line, bytes, Speaker]] = {}
        self._forgotten_at = 0.0

    def take(self, file: int, record: ArchiveRow) -> None:
        """Take the next record of a file. Raises whatever one that is not ours leads to."""
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
        line = Line(row["number"], at, uid=row["uid"], is_restored=True)
        if row["is_more"]:
            line, _, _ = self._lines.get(place, (line, b"", speaker))
            if line.turns != row["turns"] - 1:
                self._counts["lines_broken"] += line.turns < row["turns"]
                return
        _grow(line, row)
        line.used_at = at
        self._lines[place] = (line, row["parent"], speaker)

    def memory(self) -> list[ArchiveEntry]:
        """Return all of it, each thing once, what was used last behind all else."""
        lines = self._merged()
        rows = [ArchiveEntry(line.used_at, speaker, {}, line) for line, _, speaker in lines]
        rows += [ArchiveEntry(at, who, loaded) for who, (at, loaded) in self._sessions.items()]
        # A turn is used by each request of its line.
        used: dict[tuple[str, bytes], float] = {}
        for line, _, speaker in lines:
            for link in line.shape.links:
                place = (speaker.key, link)
                used[place] = max(used.get(place, 0.0), line.used_at)
        rows += [
            ArchiveEntry(max(turn.made_at, used.get((turn.api_key, turn.place), 0.0)), turn=turn)
            for turn in self._turns
        ]
        rows.sort(key=lambda row: row.at)
        return [*rows, *(ArchiveEntry(0.0, thinking=each) for each in self._thinking.items())]

    def _merged(self) -> list[tuple[Line, bytes, Speaker]]:
        """Return the lines: of two files' versions of one the later, both where it was forked."""
        rows = [row for row in self._lines.values() if row[0].used_at > self._forgotten_at]
        rows.sort(key=lambda row: row[0].used_at, reverse=True)
        versions: dict[bytes, list[Line]] = {}
        kept = []
        for row in rows:
            line, known = row[0], versions.setdefault(row[0].uid, [])
            if not any(line.shape.chain in other.past for other in known):
                known.append(line)
                kept.append(row)
        for line, parent, _ in kept:
            line.parent = next(iter(versions.get(parent, ())), None)
        for each in versions.values():
            for fork in each[1:]:
                fork.uid = secrets.token_bytes(UID_BYTES)
        return kept


def _grow(line: Line, row: ArchiveRow) -> None:
    """Bring `line` to where `row` has it."""
    was = line.shape
    kept = was.names[: row["names_kept"]]
    rows = (MessageName(*each) for each in row["names"])
    names = (*kept, *linked(rows, kept[-1].link if kept else START))
    if row["tokens_kept"] > len(line.tokens):
        raise ValueError("a record goes on with tokens that are not there")
    tokens = np.concatenate([line.tokens[: row["tokens_kept"]], _tokens(row["tokens"])])
    line.shape = PromptShape(
        names=names,
        roles=(*was.roles[: len(kept)], *row["roles"]),
        tools=was.tools if row["tools"] is None else _pairs(row["tools"]),
        options=was.options if row["options"] is None else _pairs(row["options"]),
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
