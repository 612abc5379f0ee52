"""Reports the sessions of a worker: what they are, by whom, since when, and what they lost.

A conversation whose client names no session is a session of its own here, told by its line.
"""

import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hearth.worker.sessions.conversation_lines import (
    REQUESTS_MAX,
    ConversationLines,
    Line,
    LineFacts,
    Session,
)
from hearth.worker.sessions.session_archive import SessionArchive
from hearth.worker.sessions.session_visit import SessionVisit

TREE_LINES_MAX: Final = 40  # of a session that is reported in brief, the most recently used
TREE_ROWS_MAX: Final = 160  # of all of them together
TREE_LINE_ROWS_MAX: Final = 40  # of each, the last
SPEED_TOKENS_MIN: Final = 16  # as in /metrics: the speed of fewer says nothing


@dataclass(frozen=True, slots=True)
class _Told:
    """One session as it is reported, with its lines of one moment. Immutable."""

    label: str
    session: Session
    lines: Sequence[Line]
    used_at: float


class SessionReports:
    """Tells of a worker's sessions. Any thread; the lock is held for copies alone."""

    def __init__(
        self, lines: ConversationLines, lock: threading.Lock, archive: SessionArchive, model: str
    ) -> None:
        """`lines` are changed under `lock` alone; `model` is the worker's, by its public name."""
        self._lines = lines
        self._lock = lock
        self._archive = archive
        self._model = model

    def sessions(self, key: str = "") -> list[dict[str, Any]]:
        """Return a row for each session of `key`, "" = all, the most recently used first."""
        now = time.monotonic()
        found = sorted(self._of(key), key=lambda told: told.used_at, reverse=True)
        return [self._row(told, now) for told in found]

    def session(self, label: str, key: str = "") -> dict[str, Any] | None:
        """Return the lines of the sessions called `label` of `key`, "" = all; None of none."""
        found = self._lines_of(label, key)
        lines = [self._line(session, line, REQUESTS_MAX) for session, line in found or ()]
        return None if found is None else {"session": label, "lines": lines}

    def brief(self, label: str, key: str = "") -> dict[str, Any] | None:
        """Return the newest of what `session` returns, for a page that asks each second."""
        left, lines = TREE_ROWS_MAX, []
        found = self._lines_of(label, key)
        newest = sorted(found or (), key=lambda pair: pair[1].used_at, reverse=True)
        for session, line in newest[:TREE_LINES_MAX]:
            report = self._line(session, line, min(left, TREE_LINE_ROWS_MAX))
            left -= len(report["requests"])
            lines.append(report)
        return None if found is None else {"session": label, "lines": lines}

    def _of(self, key: str, label: str = "") -> list[_Told]:
        """Return the sessions of `key`, "" = all, and those called `label`, "" = all."""
        owner = self._archive.owner(key) if key else ""
        with self._lock:
            found = [
                told
                for session in self._lines.sessions
                if owner in ("", session.speaker.key)
                for told in _apart(session)
            ]
        return [told for told in found if label in ("", told.label)]

    def _lines_of(self, label: str, key: str) -> list[tuple[Session, Line]] | None:
        """Return the lines of the sessions with this label; None where there is no such session."""
        found = self._of(key, label)
        lines = [(told.session, line) for told in found for line in told.lines]
        return lines if found else None

    def _row(self, told: _Told, now: float) -> dict[str, Any]:
        first = min(told.lines, key=lambda line: line.number, default=None)
        last = max(told.lines, key=lambda line: line.used_at, default=None)
        facts = [line.about for line in told.lines]
        speeds = [each.decode_speed for each in facts if each.decode_speed is not None]
        session, is_named = told.session, told.session.is_named
        return {
            "session": told.label,
            "agent": session.speaker.agent,
            "title": (session.title if is_named else "") or (first.title if first else ""),
            "client": (session.client if is_named else "") or (last.about.client if last else ""),
            "model": self._model,
            "begun_at": min((each.begun_at for each in facts if each.begun_at), default=None),
            "lines": len(told.lines),
            "turns": sum(line.turns for line in told.lines),
            "lost": sum(each.lost for each in facts),
            "decode_speed": statistics.median(speeds) if speeds else None,
            "idle_s": round(now - told.used_at, 1),
        }

    def _line(self, session: Session, line: Line, count: int) -> dict[str, Any]:
        with self._lock:
            return session.line_report(line, count)


def _apart(session: Session) -> Iterator[_Told]:
    """Yield a session as it is reported: one without an id by the labels of its lines."""
    if session.is_named:
        yield _Told(session.label, session, list(session.lines.values()), session.used_at)
        return
    groups: dict[str, list[Line]] = {}
    for line in session.lines.values():
        groups.setdefault(session.label_of(line), []).append(line)
    for label, lines in groups.items():
        yield _Told(label, session, lines, max(line.used_at for line in lines))


def facts_after(before: LineFacts, visit: SessionVisit, row: Mapping[str, Any]) -> LineFacts:
    """Return what a line is known by after a request, whose trace row is `row`."""
    speaker = visit.prompt.speaker
    lost: int = (row["divergence"] or {}).get("lost", 0)
    return LineFacts(
        label=speaker.label,
        client=speaker.client_name,
        begun_at=before.begun_at or round(visit.arrived_at, 3),
        lost=before.lost + lost,
        decode_speed=_decode_speed(row) or before.decode_speed,
    )


def _decode_speed(row: Mapping[str, Any]) -> float | None:
    """Return an answer's tokens a second after the first; None where they are too few to tell."""
    tokens, decode_ms = row["completion"], row["finish_ms"] - row["ttft_ms"]
    if tokens <= SPEED_TOKENS_MIN or decode_ms <= 0:
        return None
    return round((tokens - 1) * 1000 / decode_ms, 1)
