"""Says where what MLX compiles may lie: never where another user can write."""

import stat
from pathlib import Path

import pytest

from hearth.shared import private_temp_directory
from hearth.shared.errors import StartError
from hearth.shared.private_temp_directory import temp_environment


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory below home that is taken; it is not there yet."""
    directory = tmp_path / "home" / "tmp"
    monkeypatch.setattr(private_temp_directory, "PRIVATE_TEMP", directory)
    return directory


def given(directory: Path, mode: int) -> dict[str, str]:
    directory.mkdir()
    directory.chmod(mode)
    return {"TMPDIR": str(directory)}


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o770, 0o702, 0o755])
def test_kernels_planted_where_others_can_write_are_not_loaded(
    mode: int, home: Path, tmp_path: Path
) -> None:
    environ = given(tmp_path / "shared", mode)
    assert temp_environment(environ, tmp_path / "run") == {"TMPDIR": str(home)}
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_temporary_directory_of_this_user_alone_stays(home: Path, tmp_path: Path) -> None:
    assert temp_environment(given(tmp_path / "own", 0o700), tmp_path / "run") == {}
    assert not home.exists()


def test_a_temporary_directory_that_is_missing_is_replaced(home: Path, tmp_path: Path) -> None:
    environ = {"TMPDIR": str(tmp_path / "gone")}
    assert temp_environment(environ, tmp_path / "run") == {"TMPDIR": str(home)}


def test_a_home_that_cannot_be_written_leaves_the_run_directory(home: Path, tmp_path: Path) -> None:
    home.parent.write_text("no directory")
    found = temp_environment({"TMPDIR": "/gone"}, tmp_path / "run")
    assert found == {"TMPDIR": str(tmp_path / "run" / "tmp")}
    assert stat.S_IMODE((tmp_path / "run" / "tmp").stat().st_mode) == 0o700


def test_without_any_directory_of_its_own_nothing_starts(home: Path, tmp_path: Path) -> None:
    for parent in (home.parent, tmp_path / "run"):
        parent.mkdir()
        (parent / "tmp").symlink_to(tmp_path)  # another user's, for all that is known
    with pytest.raises(StartError, match="chmod 700"):
        temp_environment({"TMPDIR": "/gone"}, tmp_path / "run")


def test_one_that_others_can_enter_is_closed_to_them(home: Path, tmp_path: Path) -> None:
    home.mkdir(parents=True)
    home.chmod(0o777)
    assert temp_environment({"TMPDIR": "/gone"}, tmp_path / "run") == {"TMPDIR": str(home)}
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
