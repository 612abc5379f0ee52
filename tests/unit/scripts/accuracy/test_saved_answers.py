"""Answers that are kept for another run come back as they were, and are their owner's alone."""

import stat
from pathlib import Path

import pytest

from hearth.commands.accuracy.answer_changes import Reply
from hearth.commands.accuracy.saved_answers import (
    SavedRun,
    check_writable,
    digest_of,
    load,
    save,
)
from hearth.commands.server_client import ProbeError

REPLY = Reply("B é", "hm", ('read {"path": "a"}',), ((" B", -0.25), ("é", -3e-7)), 90, 80, "ssd")
RUN = SavedRun({"q": "abc"}, {"cold": {"q": REPLY}, "warm": {}})


def test_a_saved_run_comes_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    check_writable(path)
    save(path, RUN)
    assert load(path) == RUN
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]


def test_a_saved_run_is_the_owners_alone_also_over_an_open_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("x")
    path.chmod(0o644)
    check_writable(path)
    save(path, RUN)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no saved answers"),
        ("[]", "holds no saved answers"),
        ('{"format": 2}', "its format is 2, expected 1"),
        ('{"format": 1, "digests": {}}', "KeyError 'passes'"),
        ('{"format": 1, "passes": {"cold": {"q": {"x": 1}}}}', "make one with hearth eval --save"),
    ],
)
def test_another_file_is_told(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(ProbeError, match=said):
        load(path)


def test_a_place_that_takes_no_file_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "run.json"):
        with pytest.raises(ProbeError, match="cannot be written"):
            check_writable(path)
    with pytest.raises(ProbeError, match="cannot be read: No such file"):
        load(tmp_path / "none.json")


def test_a_digest_tells_requests_apart_whatever_the_order_of_their_fields() -> None:
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})
