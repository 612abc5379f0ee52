"""Checks when a start says that cache traces lie elsewhere than before."""

from pathlib import Path

import pytest

from hearth.proxy import startup_banner
from hearth.proxy.startup_banner import moved_traces_line
from hearth.shared.settings_from_env import load_settings


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return where traces were, with one in it, and where they are now, with none."""
    old, new = tmp_path / "checkout" / "logs", tmp_path / ".hearth" / "logs"
    (old / "2026-11-21").mkdir(parents=True)
    (old / "2026-11-21" / "cache-session-one.log").touch()
    monkeypatch.setattr(startup_banner, "DEFAULT_LOG_ROOT", new)
    monkeypatch.setattr("hearth.shared.settings.DEFAULT_LOG_ROOT", new)
    return old, new


def test_a_start_says_once_where_traces_are_now(roots: tuple[Path, Path]) -> None:
    old, new = roots
    settings = load_settings({"LOG_ROOT": ""}, None)
    told = moved_traces_line(settings, old)
    assert told is not None and str(new) in told and str(old) in told and "LOG_ROOT=logs" in told
    assert (old / "2026-11-21" / "cache-session-one.log").exists()
    (new / "2026-11-22").mkdir(parents=True)
    assert moved_traces_line(settings, old) == told
    (new / "2026-11-22" / "cache-session-two.log").touch()
    assert moved_traces_line(settings, old) is None


def test_a_start_says_nothing_where_nothing_has_moved(roots: tuple[Path, Path]) -> None:
    old, new = roots
    default = {"LOG_ROOT": ""}
    assert moved_traces_line(load_settings({"LOG_ROOT": str(old)}, None), old) is None
    assert moved_traces_line(load_settings(default, None), new) is None
    off = load_settings(default | {"ENABLE_REQUEST_LOGGING": "false"}, None)
    assert moved_traces_line(off, old) is None
