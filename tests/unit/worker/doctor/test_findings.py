"""Tests for worker/doctor/findings.py: what was found comes back, and nothing else is believed."""

import dataclasses
import json
import math
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hearth.worker.doctor.findings import (
    FILE_BYTES_MAX,
    FOLDER,
    CheckResult,
    Findings,
    FindingsFile,
    Subject,
    findings_from,
    findings_json,
)
from hearth.worker.doctor.report_text import findings_of

SUBJECT = Subject("Apple M2 Max", "metal", "ab" * 16, "0.32.4", "0.32.2")
FOUND = Findings(
    SUBJECT,
    "bfloat16",
    (
        CheckResult("rows", "ok", {"cost_2": 1.25, "backend": "metal", "equal": True}, 0.5),
        CheckResult("ssd", "left out", {"mb": None}, 0.0, "the day's writes are spent"),
        CheckResult("rewinds", "fault", {}, 1.5, "3 of 80 tokens differ"),
    ),
    exact=True,
    chunk=1024,
    float16=None,
    row_costs={1: 1.0, 2: 1.25, 8: 2.5},
    drafts_alike=True,
    made_at=1.5e9,
)


def path_of(directory: Path) -> Path:
    return directory / FOLDER / SUBJECT.file_name


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    file = FindingsFile(tmp_path / "kv", SUBJECT)
    assert file.load() is None
    file.save(FOUND)
    file.save(FOUND)
    assert file.load() == FOUND
    assert [check.name for check in FOUND.faults] == ["rewinds"]


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    FindingsFile(tmp_path / "kv", SUBJECT).save(FOUND)
    path = path_of(tmp_path / "kv")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@given(
    costs=st.dictionaries(st.integers(2, 64), st.floats(1e-6, 1e6), min_size=1),
    alike=st.sampled_from([None, True, False]),
)
def test_costs_of_rows_come_back_by_their_numbers(
    costs: dict[int, float], alike: bool | None
) -> None:
    found = dataclasses.replace(FOUND, row_costs={1: 1.0, **costs}, drafts_alike=alike)
    assert findings_from(json.loads(json.dumps(findings_json(found)))) == found
    assert findings_from(findings_json(found)) == found, "as a server's answer, too"


@pytest.mark.parametrize(
    "text",
    [b"", b"\n", b"{}", b"\xff\xfe", b"[" * 100_000, b" " * (FILE_BYTES_MAX + 1)],
)
def test_a_foreign_file_is_as_good_as_none(tmp_path: Path, text: bytes) -> None:
    file = FindingsFile(tmp_path, SUBJECT)
    file.save(FOUND)
    path_of(tmp_path).write_bytes(text)
    assert file.load() is None
    file.save(FOUND)
    assert file.load() == FOUND


@given(st.integers(0, 2**20), st.booleans())
def test_a_torn_or_changed_file_is_as_good_as_none(place: int, is_torn: bool) -> None:
    """A start goes by what it says: no value is believed that no check told."""
    with tempfile.TemporaryDirectory() as name:
        file = FindingsFile(Path(name), SUBJECT)
        file.save(FOUND)
        content = bytearray(path_of(Path(name)).read_bytes())
        place %= len(content)
        content[place] ^= 1
        path_of(Path(name)).write_bytes(content[:place] if is_torn else content)
        assert file.load() is None


def test_a_file_about_another_machine_is_as_good_as_none(tmp_path: Path) -> None:
    other = dataclasses.replace(SUBJECT, chip="Apple M1")
    FindingsFile(tmp_path, SUBJECT).save(FOUND)
    path_of(tmp_path).rename(tmp_path / FOLDER / other.file_name)
    assert FindingsFile(tmp_path, other).load() is None


@pytest.mark.parametrize(
    "odd",
    [
        {"schema": 99},
        {"checks": [{"name": "rows"}]},
        {"more": 1},
        {"row_costs": {"two": 2}},
        {"row_costs": []},
    ],
)
def test_a_report_of_another_version_has_no_findings(odd: dict[str, object]) -> None:
    assert findings_of({"findings": findings_json(FOUND) | odd}) is None


def test_a_link_in_its_place_is_as_good_as_none(tmp_path: Path) -> None:
    """What else may lie there is held where small files are read."""
    file, path = FindingsFile(tmp_path, SUBJECT), path_of(tmp_path)
    file.save(FOUND)
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
    assert file.load() is None


def test_figures_that_are_no_numbers_become_none(tmp_path: Path) -> None:
    file = FindingsFile(tmp_path, SUBJECT)
    odd = CheckResult("logits", "fault", {"worst": math.nan, "best": math.inf, "count": 3})
    file.save(Findings(SUBJECT, "float16", (odd,)))
    found = file.load()
    assert found is not None
    assert found.checks[0].figures == {"worst": None, "best": None, "count": 3}


def test_another_machine_model_or_version_has_a_file_of_its_own() -> None:
    others = [
        Subject("Apple M1", "metal", "ab" * 16, "0.32.4", "0.32.2"),
        Subject("Apple M2 Max", "cpu", "ab" * 16, "0.32.4", "0.32.2"),
        Subject("Apple M2 Max", "metal", "cd" * 16, "0.32.4", "0.32.2"),
        Subject("Apple M2 Max", "metal", "ab" * 16, "0.33.0", "0.32.2"),
        Subject("Apple M2 Max", "metal", "ab" * 16, "0.32.4", "0.33.0"),
    ]
    assert len({SUBJECT.file_name, *(other.file_name for other in others)}) == 6
