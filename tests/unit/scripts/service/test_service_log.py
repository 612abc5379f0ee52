"""A service's log stays within its size, whoever writes to it and for however long."""

import os
import stat
from pathlib import Path

from hearth.commands.service.foreground import bound, old_log, open_log

LINE = b"12:00:00 worker-0 I request id=%05d ended=stop\n"


def written(log: int, first: int, count: int) -> None:
    """Write lines as a worker does, which has a copy of the descriptor that it was given."""
    worker = os.dup(log)
    for number in range(first, first + count):
        os.write(worker, LINE % number)
    os.close(worker)


def test_a_log_that_is_written_for_ever_takes_two_bounded_files(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "service.log"
    log = open_log(path)
    for number in range(0, 1_000, 5):
        written(log, number, 5)
        bound(log, path, 1_000)
        assert path.stat().st_size <= 1_000
        assert number == 0 or not old_log(path).exists() or old_log(path).stat().st_size <= 1_000
    assert {each.name for each in path.parent.iterdir()} == {path.name, old_log(path).name}
    kept = (old_log(path).read_bytes() + path.read_bytes()).splitlines(keepends=True)
    assert kept[-1] == LINE % 999 and kept[1:] == [
        LINE % n for n in range(1_001 - len(kept), 1_000)
    ]


def test_both_files_are_this_users_alone_whoever_made_them(tmp_path: Path) -> None:
    path = tmp_path / "service.log"
    path.write_bytes(b"x" * 600)
    path.chmod(0o644)
    bound(open_log(path), path, 500)
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (path, old_log(path))]
    assert modes == [0o600, 0o600]
    assert (path.stat().st_size, old_log(path).stat().st_size) == (0, 500)
