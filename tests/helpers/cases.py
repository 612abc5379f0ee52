"""Reads tables of cases from tests/data: a case is data, and its name is a sentence."""

import functools
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

DATA_DIR: Final = Path(__file__).parents[1] / "data"


def cases(name: str, table: str | None = None) -> list[Any]:
    """Return the cases of the YAML file tests/data/`name`, for `pytest.mark.parametrize`.

    The file, or its mapping `table`, maps what each case shows, a sentence, to the case's data.
    Raises KeyError where the file has no such table.
    """
    rows = _told(name) if table is None else _told(name)[table]
    return [pytest.param(row, id=sentence) for sentence, row in rows.items()]


@functools.cache
def _told(name: str) -> Any:
    """Return what the file says, read once and by libyaml: every process of a run collects it."""
    return yaml.load((DATA_DIR / name).read_bytes(), yaml.CSafeLoader)
