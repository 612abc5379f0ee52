"""Homes with services, for all tests of `hearth service`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.services.service_home import ServiceHome


@pytest.fixture(params=["darwin", "linux"])
def home(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServiceHome]:
    made = ServiceHome(tmp_path, request.param, monkeypatch)
    yield made
    if made.manager.process is not None:
        made.manager.process.kill()
        made.manager.process.wait()
