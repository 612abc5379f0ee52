"""Says where what MLX compiles may lie, and how many files a process may open.

It lies never where another user can write.
"""

import resource
import stat
from pathlib import Path

import pytest

from hearth.shared import process_start
from hearth.shared.errors import StartError
from hearth.shared.process_start import raise_open_file_limit, temp_environment


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory below home that is taken; it is not there yet."""
    directory = tmp_path / "home" / "tmp"
    monkeypatch.setattr(process_start, "PRIVATE_TEMP", directory)
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


NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "then"),
    [
        ((256, NO_LIMIT), (4096, NO_LIMIT)),  # macOS
        ((1024, 1024), (1024, 1024)),
        ((256, 1024), (1024, 1024)),
        ((1024, 1 << 20), (4096, 1 << 20)),
        ((8192, 1 << 20), (8192, 1 << 20)),
        ((NO_LIMIT, NO_LIMIT), (NO_LIMIT, NO_LIMIT)),
        ((128, 128), (128, 128)),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_is_wanted_and_allowed(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], then: tuple[int, int]
) -> None:
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, to: now.append(to))
    assert raise_open_file_limit(4096, 128) == then[0]
    assert now[-1] == then


def test_too_low_a_hard_limit_is_refused_with_the_figures_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (127, 127))
    with pytest.raises(StartError, match=r"127 files .* needs 128\. .*ulimit -Hn .*NumberOfFiles"):
        raise_open_file_limit(4096, 128)
