"""Answers that are kept for another run come back as they were, and are their owner's alone."""

import stat
from pathlib import Path

from hearth.commands.accuracy.answer_changes import Reply
from hearth.commands.accuracy.saved_answers import (
    SavedRun,
    check_writable,
    save,
)

REPLY = Reply("B é", "hm", ('read {"path": "a"}',), ((" B", -0.25), ("é", -3e-7)), 90, 80, "ssd")
RUN = SavedRun({"q": "abc"}, {"cold": {"q": REPLY}, "warm": {}})


def test_a_saved_run_is_the_owners_alone_also_over_an_open_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("x")
    path.chmod(0o644)
    check_writable(path)
    save(path, RUN)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
