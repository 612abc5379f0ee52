"""Defines Hearth's version; pyproject.toml reads it from here."""

from typing import Final

VERSION: Final = "0.2.0"
