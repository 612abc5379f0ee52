"""The cache trace: its names, modes and bounds, and what why.py and diff_turns.py read in it."""

import json
import logging
import os
import re
import stat
import threading
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.commands.server_client import CHUNK_TOKENS_MAX, Line, log_lines, steps
from hearth.worker.sessions import cache_trace_log
from hearth.worker.sessions.cache_trace_log import TraceLog

DAY = date(2026, 11, 21)
Row = dict[str, Any]
WAIT_S_MAX = 60.0

ROW: Row = {"session": "abc", "prompt": 5120, "cached": 5000, "divergence": None}


def log_in(root: Path, day: date = DAY) -> TraceLog:
    return TraceLog(root, is_on=True, today=lambda: day)


def written(root: Path, *sessions: str, day: date = DAY) -> int:
    """Write a row for each session, wait until all are on disk, and return how many were lost."""
    log = log_in(root, day)
    for session in sessions:
        log.write(session, {"session": session})
    log.close()
    return log.lost


def names(root: Path, day: date = DAY) -> set[str]:
    return {path.name for path in (root / day.isoformat()).iterdir()}


@pytest.fixture
def lax_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_each_request_is_one_line_of_json_in_its_sessions_file_of_the_day(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    rows = [ROW | {"turn": turn, "rules": ["line\nbreak é"]} for turn in range(3)]
    for row in rows:
        log.write("abc", row)
    log.write("", ROW)
    log.close()
    assert names(tmp_path) == {"cache-session-abc.log", "cache-session-anonymous.log"}
    content = (tmp_path / "2026-11-21" / "cache-session-abc.log").read_text()
    assert [json.loads(line) for line in content.splitlines()] == rows
    assert log.lost == 0


def test_nothing_is_made_where_it_is_off(tmp_path: Path) -> None:
    log = TraceLog(tmp_path / "logs", is_on=False)
    log.write("abc", ROW)
    log.close()
    assert not (tmp_path / "logs").exists()


@pytest.mark.usefixtures("lax_umask")
def test_directories_and_files_are_the_owners_alone_under_a_lax_umask(tmp_path: Path) -> None:
    root = tmp_path / "new" / "logs"
    assert written(root, "abc") == 0
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


@given(st.text(st.characters(), max_size=70))
def test_every_session_has_a_name_of_its_own_that_is_safe_in_a_path(session: str) -> None:
    name = cache_trace_log.name_of_session(session)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name)
    assert name == session or name != cache_trace_log.name_of_session(session + "x")


def test_a_file_is_rotated_once_when_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = len(json.dumps({"n": 0}, separators=(",", ":"))) + 1
    monkeypatch.setattr(cache_trace_log, "FILE_BYTES_MAX", 2 * line)
    log = log_in(tmp_path)
    for number in range(7):
        log.write("abc", {"n": number})
    log.close()
    assert names(tmp_path) == {"cache-session-abc.log", "cache-session-abc.log.1"}
    path = tmp_path / "2026-11-21" / "cache-session-abc.log"
    assert [json.loads(each)["n"] for each in path.read_text().splitlines()] == [6]
    older = path.with_name(path.name + ".1").read_text()
    assert [json.loads(each)["n"] for each in older.splitlines()] == [4, 5]


def test_a_row_larger_than_a_file_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_trace_log, "FILE_BYTES_MAX", 50)
    log = log_in(tmp_path)
    log.write("abc", {"x": "y" * 50})
    log.write("abc", {"x": "y"})
    log.close()
    assert log.lost == 1
    assert (tmp_path / "2026-11-21" / "cache-session-abc.log").read_text() == '{"x":"y"}\n'


def test_sessions_beyond_a_days_files_share_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_trace_log, "FILES_MAX", 3)
    assert written(tmp_path, "a", "b", "c", "d", "a") == 0
    expected = {f"cache-session-{name}.log" for name in ("a", "b", "other")}
    assert names(tmp_path) == expected
    assert written(tmp_path, "e", "b") == 0, "a restarted worker counts what is there"
    assert names(tmp_path) == expected
    rest = (tmp_path / "2026-11-21" / "cache-session-other.log").read_text()
    assert [json.loads(line)["session"] for line in rest.splitlines()] == ["c", "d", "e"]


def test_the_newest_fourteen_days_stay_and_only_files_of_ours_go(tmp_path: Path) -> None:
    for back in range(20):
        written(tmp_path, "abc", day=DAY - timedelta(days=20 - back))
    oldest = tmp_path / (DAY - timedelta(days=14)).isoformat()
    (tmp_path / "2020-01-01").mkdir()
    strangers = [
        tmp_path / "2020-01-01" / "notes.txt",
        tmp_path / "notes-2020-01-01",
        oldest / "cache-session-a.log.bak",
    ]
    for path in strangers:
        path.write_text("mine")
    (tmp_path / "2020-01-01" / "cache-session-a.log.1").write_text("ours")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "cache-session-a.log").write_text("theirs")
    (tmp_path / "2019-01-01").symlink_to(elsewhere)
    assert written(tmp_path, "abc") == 0
    days = {path.name for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()}
    kept = {(DAY - timedelta(days=back)).isoformat() for back in range(14)}
    assert days == kept | {"2020-01-01", oldest.name, "elsewhere"}
    assert [path.name for path in oldest.iterdir()] == ["cache-session-a.log.bak"]
    assert all(path.read_text() == "mine" for path in strangers)
    assert not (tmp_path / "2020-01-01" / "cache-session-a.log.1").exists()
    assert (elsewhere / "cache-session-a.log").read_text() == "theirs"


def test_a_broken_disk_is_counted_and_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "logs"
    root.write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING):
        assert written(root, "a", "b", "c") == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(root) in caplog.text


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    assert written(tmp_path, "other-session") == 0
    target = tmp_path / "victim"
    target.write_text("untouched")
    (tmp_path / "2026-11-21" / "cache-session-abc.log").symlink_to(target)
    assert written(tmp_path, "abc") == 1
    assert target.read_text() == "untouched"


def test_a_fifo_in_the_place_of_a_file_costs_its_sessions_rows_alone(tmp_path: Path) -> None:
    assert written(tmp_path, "other-session") == 0
    os.mkfifo(tmp_path / "2026-11-21" / "cache-session-abc.log")
    assert written(tmp_path, "abc", "def") == 1
    assert (tmp_path / "2026-11-21" / "cache-session-def.log").stat().st_size > 0


def test_writing_never_waits_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate = threading.Event(), threading.Event()
    monkeypatch.setattr(
        cache_trace_log, "append_line", lambda *_: entered.set() or gate.wait(WAIT_S_MAX)
    )
    monkeypatch.setattr(cache_trace_log, "RECORDS_WAITING_MAX", 5)
    log = log_in(tmp_path)
    log.write("abc", ROW)
    assert entered.wait(WAIT_S_MAX)
    for _ in range(7):
        log.write("abc", ROW)
    assert log.lost == 2, "what would grow without end is dropped, and the disk still hangs"
    gate.set()
    log.close()
    assert log.lost == 2


# ---------------------------------------------------------------- a session's requests


def request(prompt: int, cached: int, divergence: Row | None = None, **more: Any) -> Row:
    row: Row = {
        "at": "2026-11-21T10:00:00+0000",
        "request_id": f"r{prompt}",
        "session": "abc",
        "line": 3,
        "kind": "main",
        "turn": 1,
        "messages": 17,
        "stable_prefix_msg_count": 15,
        "cache_key_delta_chars": 40,
        "prompt": prompt,
        "cached": cached,
        "prefilled": prompt - cached,
        "completion": 11,
        "divergence": divergence,
    }
    return row | more


def told_loss(token: int, lost: int, cause: str = "tool result") -> Row:
    about = {"message": 4, "role": "tool", "rule": None, "remedy": f"Against {cause}."}
    return {"token": token, "lost": lost, "cause": cause} | about


def line_of(*rows: Row) -> Line:
    return Line("abc", "3", "main", list(rows))


def figures(*rows: Row) -> list[tuple[int | None, int, int]]:
    return [(each.reusable, each.lost, each.unexplained) for each in steps(line_of(*rows))]


def test_a_request_that_finds_the_one_before_and_its_answer_lost_nothing() -> None:
    assert figures(request(100, 0), request(150, 110)) == [(None, 0, 0), (110, 0, 0)]
    assert figures(request(100, 0), request(105, 104))[1] == (105, 1, 1), "it is shorter than both"


def test_a_loss_without_a_told_cause_is_unexplained() -> None:
    assert figures(request(100, 0), request(150, 30))[1] == (110, 80, 80)
    for cause in ("", "unknown", "unexplained"):
        rows = request(100, 0), request(150, 30, told_loss(40, 70, cause))
        assert figures(*rows)[1] == (110, 80, 80)


def test_a_told_cause_explains_what_stands_behind_it_and_a_chunk_before() -> None:
    kept = 5000 - CHUNK_TOKENS_MAX
    rows = request(6000, 0), request(6100, kept, told_loss(5000, 1010))
    assert figures(*rows)[1] == (6010, 6010 - kept, 0)
    rows = request(6000, 0), request(6100, kept - 7, told_loss(5000, 1010))
    assert figures(*rows)[1] == (6010, 6017 - kept, 7)


def test_the_first_request_of_a_branch_lost_what_it_is_told_to_have_lost() -> None:
    assert figures(request(100, 40, told_loss(40, 70))) == [(None, 70, 0)]


def saved(path: Path, *rows: Row) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_log_gives_its_lines_with_what_was_rotated_and_without_cancelled_requests(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cache-session-abc.log"
    saved(tmp_path / "cache-session-abc.log.1", request(1, 0), request(9, 0, line=4))
    cancelled = {name: value for name, value in request(5, 0).items() if name != "line"}
    other = request(7, 0, session="other")
    saved(path, request(2, 0), cancelled, other, request(8, 0, worker=1))
    lines = {(line.session, line.name): line.requests for line in log_lines(path)}
    sizes = {place: [row["prompt"] for row in rows] for place, rows in lines.items()}
    expected = {("abc", "3"): [1, 2], ("abc", "4"): [9], ("other", "3"): [7], ("abc", "1/3"): [8]}
    assert sizes == expected
