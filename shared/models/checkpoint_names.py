"""Finds a checkpoint's files by name, as a file system does that minds neither case nor spelling.

On APFS and exFAT a loader that opens `config.json` gets `Config.json`; others take full-width or
otherwise composed letters for the same.
"""

import unicodedata
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path


def files_like(directory: Path, patterns: Iterable[str]) -> list[Path]:
    """Return what in `directory` any of `patterns` names, in lower case, sorted."""
    wanted = tuple(patterns)
    return sorted(
        path
        for path in directory.glob("*")
        if any(fnmatchcase(_folded(path.name), each) for each in wanted)
    )


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
