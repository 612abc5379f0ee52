"""Makes and parses the names of KV files, which name a record without its file being opened.

Names are read from disk: nothing in them is true because it is written there, and the file's own
metadata must agree (file_format.py).
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from hearth.worker.cache.block_hash import HASH_BYTES, ROOT_SCHEMA, PrefixHash

SUFFIX: Final = ".safetensors"
TEMP_PREFIX: Final = ".writing-"  # of files that are not whole yet

RULE_LENGTH_MAX: Final = 24  # characters of a cut rule's label
FAST: Final = "fast"

_HEX: Final = f"[0-9a-f]{{{2 * HASH_BYTES}}}"
_ROOT: Final = re.compile(_HEX)
_FILE: Final = re.compile(
    rf"(rows|window|state)-(fast|canonical\.([a-z0-9.]{{0,{RULE_LENGTH_MAX}}}))"
    rf"-([1-9][0-9]{{0,8}})-({_HEX})-({_HEX}){SUFFIX}"
)


class FileKind(StrEnum):
    """The kinds of record: an `Extent` has the first two, the `Joint` at its end the last."""

    ROWS = "rows"  # of the layers that keep every token; no arrays where there is no such layer
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class FileName:
    """The name of a record: what the run of `token_count` tokens from `start` to `end` left.

    `rule` is the label of the cut rule by which it is canonical, "" where it is fast;
    `is_canonical` says that this is the rule by which this server cuts.
    """

    kind: FileKind
    start: PrefixHash
    end: PrefixHash
    token_count: int
    is_canonical: bool
    rule: str = ""

    def __post_init__(self) -> None:
        assert self.token_count > 0 and self.start != self.end, self

    @property
    def quality(self) -> str:
        """What a file says of how it was made."""
        return f"canonical.{self.rule}" if self.is_canonical or self.rule else FAST

    @property
    def file_name(self) -> str:
        ends = f"{self.start.hex()}-{self.end.hex()}"
        return f"{self.kind}-{self.quality}-{self.token_count}-{ends}{SUFFIX}"


def parse(file_name: str, rule: str) -> FileName | None:
    """Return the record's name that a file's name spells; None where it is no name of ours.

    `rule` is the label of the rule by which this server cuts.
    """
    match = _FILE.fullmatch(file_name)
    if match is None:
        return None
    kind, quality, label, count, start, end = match.groups()
    if start == end or (label == "" and rule):
        return None
    is_canonical = quality != FAST and label == rule
    return FileName(FileKind(kind), _hash(start), _hash(end), int(count), is_canonical, label or "")


def is_root(directory_name: str) -> bool:
    """Whether a directory of this name holds the files of one root."""
    return _ROOT.fullmatch(directory_name) is not None


def is_of_today(root: str) -> bool:
    """Whether a root is of today's schema: no server of this version reads any other."""
    return root.startswith(f"{ROOT_SCHEMA:02x}")


def _hash(text: str) -> PrefixHash:
    return PrefixHash(bytes.fromhex(text))
