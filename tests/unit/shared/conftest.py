"""Gives journals their directory, and makes them eager."""

from pathlib import Path

import pytest

from hearth.shared import durable_journal


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "kv" / "notes-0"


@pytest.fixture
def is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a file rewritten whenever it doubles."""
    monkeypatch.setattr(durable_journal, "REWRITE_BYTES_MIN", 64)
    monkeypatch.setattr(durable_journal, "RETRY_S", 0.0)
