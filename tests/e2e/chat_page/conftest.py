"""One Chromium for all tests of the page to talk; each opens a tab in a profile of its own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.clients.browser import chromium


@pytest.fixture(scope="session")
def devtools() -> Iterator[str]:
    with chromium() as address:
        yield address


@pytest.fixture(scope="session")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that pictures go to."""
    directory = Path(os.environ.get("HEARTH_ARTEFACTS") or tmp_path_factory.mktemp("chat"))
    directory.mkdir(parents=True, exist_ok=True)
    return directory
