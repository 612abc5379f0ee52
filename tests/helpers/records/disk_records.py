"""Makes small KV records for the tests of worker/disk, each different by its seed."""

from typing import Any

import numpy as np

from hearth.worker.cache.block_hash import PrefixHash, pack, prefix_hashes, root_hash
from hearth.worker.disk.file_format import DTYPES, Array, FileKind, Record

ROOT = root_hash(["model", "layout"])
OTHER_ROOT = root_hash(["another model", "layout"])


def array(name: str, dtype: str, shape: tuple[int, ...], seed: int) -> Array:
    """Return an array of random bits: NaNs too."""
    size = int(np.prod(shape)) * DTYPES[dtype].itemsize
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == "BOOL" else 256, size, np.uint8)
    return Array(name, dtype, bits.view(DTYPES[dtype]).reshape(shape))


def record(
    seed: int = 0,
    nbytes: int = 4096,
    *,
    before: Record | None = None,
    count: int = 8,
    root: PrefixHash = ROOT,
    **fields: Any,
) -> Record:
    """Return rows of `count` tokens behind `before`, or behind the root; names are true ones."""
    position = 0 if before is None else before.position + len(before.tokens)
    start = root if before is None else before.end
    tokens = pack([seed * 1000 + number for number in range(count)])
    (end,) = prefix_hashes(start, tokens, [count])
    arrays = (
        array("0.keys", "BF16", (1, 2, nbytes // 8, 1), seed),
        array("0.values", "F32", (nbytes // 8,), seed + 1),
    )
    known: dict[str, Any] = {"is_canonical": True, "kind": FileKind.ROWS, "arrays": arrays}
    return Record(root, start, end, position, tokens, **(known | fields))


def chain(length: int, seed: int = 0, nbytes: int = 4096, **fields: Any) -> list[Record]:
    """Return records of which each goes on from the one before."""
    found: list[Record] = []
    for number in range(length):
        before = found[-1] if found else None
        found.append(record(seed + number, nbytes, before=before, **fields))
    return found


def contents(record: Record) -> tuple[Any, ...]:
    """Return all that a record says, to compare bit by bit."""
    arrays = [(a.name, a.dtype, a.values.shape, a.values.tobytes()) for a in record.arrays]
    return (*(record.root, record.name, record.position, record.tokens.tolist()), arrays)
