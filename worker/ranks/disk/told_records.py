"""Writes names and records of KV files as what can be told to other ranks, and reads them."""

from typing import Any

import numpy as np

from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.file_format import Array, Record
from hearth.worker.disk.file_names import FileKind, FileName
from hearth.worker.ranks.rank_link import Value


def told_name(name: FileName) -> list[Value]:
    """Return a record's name as it is told."""
    ends = (bytes(name.start), bytes(name.end))
    return [str(name.kind), *ends, name.token_count, name.is_canonical, name.rule]


def name_from(told: list[Any]) -> FileName:
    """Return a record's name by what was told."""
    kind, start, end, token_count, is_canonical, rule = told
    ends = (PrefixHash(start), PrefixHash(end))
    return FileName(FileKind(kind), *ends, token_count, is_canonical, rule)


def told_record(record: Record) -> list[Value]:
    """Return what a record says as it is told; root and arrays are each rank's own."""
    tokens = record.tokens.astype("<i4", copy=False).tobytes()
    return [told_name(record.name), record.position, tokens]


def kind_from(told: list[Any]) -> FileKind:
    """Return the kind of a record by what was told of it."""
    return name_from(told[0]).kind


def record_from(told: list[Any], root: PrefixHash, arrays: tuple[Array, ...]) -> Record:
    """Return a rank's own record by what was told."""
    name, position, tokens = name_from(told[0]), told[1], told[2]
    return Record(
        root=root,
        start=name.start,
        end=name.end,
        position=position,
        tokens=np.frombuffer(tokens, "<i4").astype(np.int32),
        is_canonical=name.is_canonical,
        kind=name.kind,
        arrays=arrays,
        rule=name.rule,
    )
