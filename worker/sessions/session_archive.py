"""Keeps turns and sessions on disk, so that both outlive the worker, however the worker ends.

A record holds the turn, the line and the session of one request. If the file already holds a line,
only the line's new part is written. Records hold prompts and answers; shared/durable_journal.py
says how records are kept private. Instead of an API key, a record has the journal's name for the
key, from which the key cannot be found by trials.
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
from hearth.worker.prompt.prompt_with_sampled_turns import PromptPrefix
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
WRITTEN_MAX: Final = 4_096  # most lines that are remembered as written to the file

ArchiveRecord = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """A part of a session, after one request or as it is now. Immutable."""

    at: float  # time of the last use in seconds, by wall clock
    speaker: Speaker | None = None
    loaded: Mapping[str, bytes] | None = None  # tools that the speaker's session loaded
    line: Line | None = None  # a copy of the session's line
    before: tuple[PromptShape, Tokens] | None = None  # the line before it grew
    turn: Turn | None = None
    thinking: tuple[bytes, str] | None = None  # (`thinking_key`, text) of no kept turn
    forgets: bool = False  # whether all lines up to time `at` were forgotten

    @property
    def nbytes(self) -> int:
        """The approximate memory that the entry keeps alive, in bytes."""
        line = 4 * len(self.line.tokens) if self.line is not None else 0
        return line + (self.turn.nbytes if self.turn is not None else 0) + 2_048


class SessionArchive:
    """Reads the entries of earlier workers once, and writes the entries of this worker.

    Any thread may call methods, except the methods that make records, which are for the journal
    writer's thread.
    Invariants: `load` is called once, before any entry is added. A record has only a part of a line
    if the rest of the line is in an earlier record.
    """

    def __init__(
        self, directory: Path | None, everything: Callable[[], Iterable[ArchiveEntry]]
    ) -> None:
        """`everything` returns all remembered entries; the journal writer's thread calls it.

        Without a directory, nothing is written.
        """
        self._may_load = True
        self.everything = everything
        # Kept for nobody: ids of the lines in the journal
        self._written: OrderedDict[bytes, int] = OrderedDict()  # uid of a line -> number of turns
        self._lost: Counter[str] = Counter()
        # Kept for one key: journals of turns, thinking and sessions
        self.journal = open_journal_writer(directory, self, SCHEMA)

    def load(self) -> list[ArchiveEntry]:
        """Return the entries of earlier workers, each once, least recently used first.

        Records that cannot be read are counted.
        """
        assert self._may_load, "the journal was read or written before"
        self._may_load = False
        reader = RecordReader(self._lost)
        for file, record in self.journal.read():
            try:
                reader.take(file, record)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError):
                self._lost["records_odd"] += 1
        return reader.entries()

    def add(self, entry: ArchiveEntry) -> None:
        """Queue `entry` for writing. Never blocks."""
        self._may_load = False
        self.journal.put(entry, entry.nbytes)

    def report(self) -> dict[str, int]:
        """Return the counters of written records, and of records that could not be read."""
        return {**self._lost, **self.journal.report()}

    # ------------------------------------------------------------ the journal writer's thread

    def lost(self) -> None:
        """Forget which lines the journal has: every line is written in full the next time."""
        self._written.clear()

    def record(self, entry: ArchiveEntry) -> ArchiveRecord:
        """Return the record of `entry`."""
        record: ArchiveRecord = {"at": entry.at}
        if (speaker := entry.speaker) is not None:
            loaded = dict(entry.loaded or {})
            record["session"] = [
                speaker.key,
                speaker.session,
                speaker.agent,
                speaker.parent,
                loaded,
            ]
        if entry.line is not None:
            record["line"] = self._line(entry.line, entry.before)
        if (turn := entry.turn) is not None:
            answer, calls = (
                turn.answer,
                [[name, arguments] for name, arguments in turn.answer.calls],
            )
            words: list[Any] = [answer.reasoning, answer.content, calls, turn.text]
            details = [turn.call_ids, turn.signature, turn.made_at, turn.prefix]
            record["turn"] = [turn.api_key, turn.link, _token_bytes(turn.ids), *words, *details]
        if entry.thinking is not None:
            record["thinking"] = list(entry.thinking)
        if entry.forgets:
            record["forgets"] = True
        return record

    def _line(self, line: Line, before: tuple[PromptShape, Tokens] | None) -> ArchiveRecord:
        """Return the record of `line`, without `before`, the part in an earlier record."""
        if self._written.get(line.uid) != line.turns - 1:
            before = None
        self._written[line.uid] = line.turns
        self._written.move_to_end(line.uid)
        if len(self._written) > WRITTEN_MAX:
            self._written.popitem(last=False)
        shape, rows = line.shape, list(line.rows)
        old_shape, old_tokens = before or (PromptShape(), line.tokens[:0])
        pairs = zip(old_shape.names, shape.names, old_shape.roles, shape.roles, strict=False)
        same = takewhile(lambda pair: pair[0] == pair[1] and pair[2] == pair[3], pairs)
        names = sum(1 for _ in same)
        tokens = common_length(old_tokens, line.tokens)
        return {
            "uid": line.uid,
            "number": line.number,
            "parent": line.parent.uid if line.parent is not None else b"",
            "branch": [line.branch_message, line.branch_token],
            "turns": line.turns,
            "is_more": before is not None,  # whether this extends the line's last record
            "names_kept": names,
            "names": [[name.canonical, name.exact, name.rules] for name in shape.names[names:]],
            "roles": shape.roles[names:],
            "tools": None if before and old_shape.tools == shape.tools else shape.tools,
            "chain": shape.chain,  # read by earlier versions of Hearth
            "options": None if before and old_shape.options == shape.options else shape.options,
            "tokens_kept": tokens,
            "tokens": _token_bytes(line.tokens[tokens:]),
            "prompt_tokens": line.prompt_tokens,
            "past": None if before else [[a, b, c] for a, (b, c) in line.past.items()],
            "rows": rows[-1:] if before else rows,
            "adapter": line.adapter,
            "about": list(astuple(line.facts)),
        }


def _token_bytes(tokens: Tokens) -> bytes:
    return tokens.astype("<i4").tobytes()


# ---------------------------------------------------------------- reading


class RecordReader:
    """Assembles entries from records. Owner: the thread that starts the worker; used once."""

    def __init__(self, counts: Counter[str]) -> None:
        """`counts` counts the records that cannot be read."""
        self._counts = counts
        self._turns: list[Turn] = []
        self._thinking: dict[bytes, str] = {}
        self._sessions: dict[Speaker, tuple[float, dict[str, bytes]]] = {}
        self._lines: dict[tuple[int, bytes], tuple[Line, bytes, Speaker]] = {}
        self._forgotten_at = 0.0

    def take(self, file: int, record: ArchiveRecord) -> None:
        """Take the next record of a file.

        Raises:
            KeyError, IndexError, TypeError, ValueError, AttributeError: the record is malformed.
        """
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
            api_key, session, agent, parent, loaded = record["session"]
            speaker = Speaker(api_key, session, agent, parent)
            known = self._sessions.get(speaker)
            if known is None or known[0] <= at:
                self._sessions[speaker] = (at, dict(loaded))
            if "line" in record:
                self._take_line(file, record["line"], speaker, at)

    def _take_line(self, file: int, record: ArchiveRecord, speaker: Speaker, at: float) -> None:
        line_id = (file, record["uid"])
        line = Line(record["number"], at, uid=record["uid"], is_restored=True)
        if record["is_more"]:
            line, _, _ = self._lines.get(line_id, (line, b"", speaker))
            if line.turns != record["turns"] - 1:
                self._counts["lines_broken"] += line.turns < record["turns"]
                return
        _grow(line, record)
        line.used_at = at
        self._lines[line_id] = (line, record["parent"], speaker)

    def entries(self) -> list[ArchiveEntry]:
        """Return all entries, each once, least recently used first."""
        lines = self._merged()
        entries = [ArchiveEntry(line.used_at, speaker, {}, line) for line, _, speaker in lines]
        entries += [
            ArchiveEntry(at, speaker, loaded) for speaker, (at, loaded) in self._sessions.items()
        ]
        # Each request of a line uses the line's turns.
        used: dict[tuple[str, bytes], float] = {}
        for line, _, speaker in lines:
            for link in line.shape.links:
                turn_key = (speaker.key, link)
                used[turn_key] = max(used.get(turn_key, 0.0), line.used_at)
        entries += [
            ArchiveEntry(max(turn.made_at, used.get((turn.api_key, turn.link), 0.0)), turn=turn)
            for turn in self._turns
        ]
        entries.sort(key=lambda entry: entry.at)
        return [
            *entries,
            *(ArchiveEntry(0.0, thinking=thought) for thought in self._thinking.items()),
        ]

    def _merged(self) -> list[tuple[Line, bytes, Speaker]]:
        """Return the latest version of each line, or all versions if the line forked."""
        candidates = [
            candidate
            for candidate in self._lines.values()
            if candidate[0].used_at > self._forgotten_at
        ]
        candidates.sort(key=lambda candidate: candidate[0].used_at, reverse=True)
        versions: dict[bytes, list[Line]] = {}
        kept = []
        for candidate in candidates:
            line, known = candidate[0], versions.setdefault(candidate[0].uid, [])
            if not any(line.shape.chain in other.past for other in known):
                known.append(line)
                kept.append(candidate)
        for line, parent, _ in kept:
            line.parent = next(iter(versions.get(parent, ())), None)
        for forks in versions.values():
            for fork in forks[1:]:
                fork.uid = secrets.token_bytes(UID_BYTES)
        return kept


def _grow(line: Line, record: ArchiveRecord) -> None:
    """Bring `line` to the state of `record`."""
    old_shape = line.shape
    kept = old_shape.names[: record["names_kept"]]
    written_names = (MessageName(*fields) for fields in record["names"])
    names = (*kept, *linked(written_names, kept[-1].link if kept else START))
    if record["tokens_kept"] > len(line.tokens):
        raise ValueError("a record goes on with tokens that are not there")
    tokens = np.concatenate([line.tokens[: record["tokens_kept"]], _tokens(record["tokens"])])
    line.shape = PromptShape(
        names=names,
        roles=(*old_shape.roles[: len(kept)], *record["roles"]),
        tools=old_shape.tools if record["tools"] is None else _pairs(record["tools"]),
        options=old_shape.options if record["options"] is None else _pairs(record["options"]),
        message_digests=frozenset(name.exact for name in names),
    )
    line.tokens, line.prompt_tokens, line.turns = tokens, record["prompt_tokens"], record["turns"]
    line.number, (line.branch_message, line.branch_token) = record["number"], record["branch"]
    line.adapter = record.get("adapter", "")  # older records have no adapter
    for chain, messages, count in record["past"] or ():
        line.past[chain] = (messages, count)
    line.past[line.shape.chain] = (len(names), len(tokens))
    while len(line.past) > PAST_MAX:
        line.past.popitem(last=False)
    line.rows.extend(record["rows"])
    if "about" in record:  # missing in records of earlier versions
        line.facts = LineFacts(*record["about"])


def _turn(fields: list[Any]) -> Turn:
    # Older records lack the prefix, the tokens before the turn.
    api_key, link, ids, reasoning, content, calls, text, call_ids, signature, made_at, *rest = (
        fields
    )
    answer = TurnContent(reasoning, content, tuple((name, arguments) for name, arguments in calls))
    prefix = PromptPrefix(*rest[0]) if any(rest) else None
    return Turn(
        api_key, link, _tokens(ids), answer, text, tuple(call_ids), signature, made_at, prefix
    )


def _tokens(octets: bytes) -> Tokens:
    return np.frombuffer(octets, dtype="<i4").astype(np.int32)


def _pairs(pairs: Iterable[Any]) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, digest) for name, digest in pairs)
