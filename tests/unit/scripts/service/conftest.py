"""Homes with services, for all tests of `hearth service`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.services.service_desk import Desk, desk_of


@pytest.fixture(params=["darwin", "linux"])
def desk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Desk]:
    made = desk_of(request.param, tmp_path, monkeypatch)
    yield made
    made.uninstall_all()


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    made = desk_of("darwin", tmp_path, monkeypatch)
    yield made
    made.uninstall_all()


@pytest.fixture
def linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    made = desk_of("linux", tmp_path, monkeypatch)
    yield made
    made.uninstall_all()
