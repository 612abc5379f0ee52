"""The count of the house counts statements, whatever their form, and only what git tracks."""

import subprocess
from pathlib import Path

import pytest

from scripts.count_house import Counts, part_of, print_counts, tracked

MODULE = '''"""A docstring is no statement."""

import os


class Room:
    """Nor is this one."""

    size: int = 1

    async def door(self) -> None:
        """Or this."""
        if os.sep: print("a"); return
        "A bare string neither."
'''


def test_docstrings_and_bare_strings_are_no_statements() -> None:
    assert Counts.of(MODULE) == Counts(files=1, lines=14, statements=7, functions=1, classes=1)


def test_no_formatting_changes_the_statements() -> None:
    packed, spread = "x = [1, 2]; y = f(x)\n", "x = [\n    1,\n    2,\n]\ny = f(\n    x\n)\n"
    assert Counts.of(packed).statements == Counts.of(spread).statements == 2


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("worker/kv/kv_manager.py", "product"),
        ("install_and_run.py", "product"),
        ("scripts/commands/main.py", "commands"),
        ("scripts/count_house.py", "dev scripts"),
        ("tests/test_tidy.py", "tests"),
        ("setup.py", "other"),
    ],
)
def test_a_file_is_of_the_first_part_that_its_path_begins_with(name: str, part: str) -> None:
    assert part_of(name) == part


def test_counts_of_one_name_add_up_and_the_largest_comes_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, two = Counts.of("x = 1\n"), Counts.of("x = 1\ny = 2\n")
    print_counts("room", [("small", one), ("large", two), ("large", two)])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [["large", "2", "4", "4", "0", "0"], ["small", "1", "1", "1", "0", "0"]]


@pytest.mark.process
def test_only_tracked_files_that_are_there_count(tmp_path: Path) -> None:
    for name in ("kept.py", "gone.py", "new.py"):
        (tmp_path / name).write_text("")
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "kept.py", "gone.py"], check=True)
    (tmp_path / "gone.py").unlink()
    assert tracked(tmp_path) == ["kept.py"]
