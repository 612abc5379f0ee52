"""Checks how far an install is said to be: from pip's lines, and from what is unpacked."""

import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hearth.shared.install_progress import BAR_CELLS, InstallProgress, bar, megabytes

FETCHED = """\
Looking in indexes: https://pypi.org/simple
Requirement already satisfied: numpy<3,>=2 in ./lib (2.4.6)
Collecting mlx-lm<0.33,>=0.32
  Downloading mlx_lm-0.32.2-py3-none-any.whl.metadata (9.1 kB)
Collecting PyYAML>=6 (from mlx-lm)
  Using cached pyyaml-6.0.4-cp312-cp312-macosx_11_0_arm64.whl (180 kB)
Collecting old-style
  Downloading old-style-1.0.tar.gz (36.8 MB)
WARNING: something
Downloading mlx_lm-0.32.2-py3-none-any.whl (411 kB)
"""
INSTALLING = "Installing collected packages: PyYAML, old-style, mlx-lm\n"


def told(venv: Path, text: str) -> InstallProgress:
    progress = InstallProgress(venv)
    kept = [line for line in text.splitlines(keepends=True) if progress.take(line)]
    assert "".join(kept) == text
    return progress


def unpack(venv: Path, name: str, *sizes: int, is_old: bool = False) -> None:
    info = venv / "lib/python3.12/site-packages" / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    rows = [f'"a, {number}.py",sha256=x,{size}\n' for number, size in enumerate(sizes)]
    (info / "RECORD").write_text("".join([*rows, f"{name}-1.0.dist-info/RECORD,,\n"]))
    (info / "INSTALLER").write_text("pip\n")
    if is_old:
        os.utime(info / "INSTALLER", (1, 1))


def test_what_is_fetched_is_counted_of_what_was_found_once_each(tmp_path: Path) -> None:
    progress = told(tmp_path, FETCHED)
    assert progress.stage == "Fetching"
    assert progress.counts() == (2, 3), "pip is still at mlx-lm"
    assert progress.line().startswith("Fetching: 2 of 3 packages, 37 MB, ")
    progress.take("Building wheels for collected packages: old-style\n")
    progress.take(INSTALLING)
    assert progress.counts() == (0, 3) and progress.stage == "Installing"


def test_the_bytes_of_the_file_under_way_are_counted_and_kept_out_of_the_log(
    tmp_path: Path,
) -> None:
    progress = told(tmp_path, "Collecting mlx\n  Downloading mlx-1-py3-none-any.whl (36.8 MB)\n")
    assert "MB" not in progress.line()
    for come in (1_000_000, 12_500_000):
        assert not progress.take(f"Progress {come} of 36800000\n")
    assert progress.line().startswith("Fetching: 0 of 1 packages, 12.5 MB, ")
    progress.take("Collecting numpy\n")
    assert progress.line().startswith("Fetching: 1 of 2 packages, 36.8 MB, ")


def test_a_wheel_of_this_machine_counts_with_its_size(tmp_path: Path) -> None:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    wheel.write_bytes(b"x" * 5000)
    assert (
        told(tmp_path, f"Processing {wheel}\n")
        .line()
        .startswith("Fetching: 1 of 1 packages, 5 kB, ")
    )


def test_what_is_unpacked_is_counted_as_soon_as_it_is_whole(tmp_path: Path) -> None:
    progress = told(tmp_path, FETCHED + INSTALLING)
    unpack(tmp_path, "pyyaml", 10**6, 500_000)
    unpack(tmp_path, "a_stranger", 10**9)
    (tmp_path / "lib/python3.12/site-packages/mlx_lm-1.0.dist-info").mkdir()
    progress.look()
    assert progress.line().startswith("Installing: 1 of 3 packages, 1.5 MB, ")
    unpack(tmp_path, "old_style", 500_000)
    progress.look()
    assert progress.counts() == (2, 3) and progress.summary() == "2 packages (2 MB)"


def test_a_package_that_is_about_to_be_replaced_is_not_counted(tmp_path: Path) -> None:
    unpack(tmp_path, "PyYAML", 10**6, is_old=True)
    progress = told(tmp_path, INSTALLING)
    progress.look()
    assert progress.counts() == (0, 3)


def test_a_second_command_of_an_install_adds_to_the_first(tmp_path: Path) -> None:
    progress = told(tmp_path, INSTALLING + "Obtaining file:///x\n" + INSTALLING[:-1] + ", hearth\n")
    assert progress.counts() == (0, 4)


def test_where_all_is_there_it_says_so(tmp_path: Path) -> None:
    text = (
        "Requirement already satisfied: numpy<3 in x\nRequirement already satisfied: mlx[cpu] in\n"
    )
    assert told(tmp_path, text).line().startswith("Fetching: 2 packages are here already, ")


@pytest.mark.parametrize(
    ("done", "whole", "full"), [(0, 0, 0), (0, 3, 0), (1, 2, 12), (142, 143, 23), (143, 143, 24)]
)
def test_a_bar_is_full_only_where_all_is_done(done: int, whole: int, full: int) -> None:
    assert bar(done, whole) == "[" + "#" * full + "-" * (BAR_CELLS - full) + "]"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 kB"), (812_000, "812 kB"), (36_800_000, "36.8 MB"), (1_623_456_789, "1.62 GB")],
)
def test_bytes_are_told_in_three_digits(size: int, text: str) -> None:
    assert megabytes(size) == text


words = st.sampled_from(
    [
        *("Collecting", "Downloading", "Using", "cached", "Processing", "Building", "wheel", "a.b"),
        *("Installing", "collected", "packages:", "a_b-1-py3-none-any.whl", "a-1.tar.gz", "(5 MB)"),
        *("Requirement", "already", "satisfied:", "Progress", "7", "of", "(1e9 MB)", "", "-", "é"),
    ]
)


@given(st.lists(st.lists(words, max_size=6), max_size=20), st.integers(1, 120))
def test_whatever_pip_prints_the_line_fits_and_no_more_is_done_than_there_is(
    lines: list[list[str]], columns: int
) -> None:
    progress = InstallProgress(Path("/nowhere"))
    for line in lines:
        progress.take(" ".join(line) + "\n")
        progress.look()
        done, whole = progress.counts()
        assert 0 <= done <= whole
        assert len(progress.line(columns)) < max(columns, 1) or columns == 1
        assert "\n" not in progress.line()
