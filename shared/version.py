"""Holds Hearth's version: the only place that states it (pyproject.toml reads it from here)."""

from typing import Final

VERSION: Final = "0.2.0"
