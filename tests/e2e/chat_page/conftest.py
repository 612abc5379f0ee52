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
def artefacts() -> Path | None:
    """The directory that pictures are wanted in: HEARTH_ARTEFACTS, else none are taken."""
    wanted = os.environ.get("HEARTH_ARTEFACTS")
    if wanted is None:
        return None
    Path(wanted).mkdir(parents=True, exist_ok=True)
    return Path(wanted)
