"""Reports the sessions of a worker: what they are, by whom, since when, and what they lost.

A conversation whose client names no session is a session of its own here, told by its line.
"""

import statistics
import sys
import threading
import time
from operator import itemgetter
from typing import Any, Final

from hearth.worker.sessions.conversation_lines import (
    REQUESTS_MAX,
    ConversationLines,
    Line,
    Session,
)
from hearth.worker.sessions.session_archive import SessionArchive

TREE_LINES_MAX: Final = 40  # of a session that is reported in brief, the most recently used
TREE_ROWS_MAX: Final = 160  # of all of them together
TREE_LINE_ROWS_MAX: Final = 40  # of each, the last

# One session as it is reported: when it was last used, its label, and its lines of one moment.
_Told = tuple[float, str, Session, list[Line]]


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
        found = sorted(self._of(key), key=itemgetter(0), reverse=True)
        return [self._row(told, now) for told in found]

    def session(self, label: str, key: str = "", is_brief: bool = False) -> dict[str, Any] | None:
        """Return the lines of the sessions called `label` of `key`, "" = all; None of none.

        `is_brief`: the newest of them, for a page that asks each second.
        """
        found = [told for told in self._of(key) if told[1] == label]
        if not found:
            return None
        pairs = [(session, line) for *_, session, lines in found for line in lines]
        left, rows_max = sys.maxsize, REQUESTS_MAX
        if is_brief:
            left, rows_max = TREE_ROWS_MAX, TREE_LINE_ROWS_MAX
            pairs.sort(key=lambda pair: pair[1].used_at, reverse=True)
            del pairs[TREE_LINES_MAX:]
        reports = []
        for session, line in pairs:
            with self._lock:
                report = session.line_report(line, min(left, rows_max))
            left -= len(report["requests"])
            reports.append(report)
        return {"session": label, "lines": reports}

    def _of(self, key: str) -> list[_Told]:
        """Return the sessions of `key`, "" = all; those without an id by their lines' labels."""
        owner = self._archive.owner(key) if key else ""
        found: list[_Told] = []
        with self._lock:
            for session in self._lines.sessions:
                if owner not in ("", session.speaker.key):
                    continue
                groups: dict[str, list[Line]] = {session.label: []} if session.is_named else {}
                for line in session.lines.values():
                    groups.setdefault(session.label_of(line), []).append(line)
                for label, lines in groups.items():
                    ends = (line.used_at for line in lines)
                    used_at = session.used_at if session.is_named else max(ends)
                    found.append((used_at, label, session, lines))
        return found

    def _row(self, told: _Told, now: float) -> dict[str, Any]:
        used_at, label, session, lines = told
        first = min(lines, key=lambda line: line.number, default=None)
        last = max(lines, key=lambda line: line.used_at, default=None)
        facts = [line.about for line in lines]
        speeds = [each.decode_speed for each in facts if each.decode_speed is not None]
        is_named = session.is_named
        return {
            "session": label,
            "agent": session.speaker.agent,
            "title": (session.title if is_named else "") or (first.title if first else ""),
            "client": (session.client if is_named else "") or (last.about.client if last else ""),
            "model": self._model,
            "begun_at": min((each.begun_at for each in facts if each.begun_at), default=None),
            "lines": len(lines),
            "turns": sum(line.turns for line in lines),
            "lost": sum(each.lost for each in facts),
            "decode_speed": statistics.median(speeds) if speeds else None,
            "idle_s": round(now - used_at, 1),
        }
