"""Workers over a directory of their own, each of which ends as the next one starts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.worker.disk_workers import Workers


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    made.kill()
