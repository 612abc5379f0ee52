"""Names prefixes of tokens by chained hashes over packed integers, never over text.

A block is what one forward of a prefill reads (worker/prompt/prefill_cuts.py), some hundreds of
tokens; the name of a prefix is the hash of the root and of every block up to its end. The root
names all that decides what KV those tokens give: nothing crosses models, settings or backends.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NewType

import numpy as np
from numpy.typing import NDArray

PrefixHash = NewType("PrefixHash", bytes)
Tokens = NDArray[np.int32]

HASH_BYTES = 16  # 128 bits: a collision would serve another prompt's KV
ROOT_SCHEMA = 3  # of what is kept, and of how its files are named


def pack(ids: Sequence[int] | Tokens) -> Tokens:
    """Return the ids as what is hashed and compared."""
    return np.asarray(ids, dtype=np.int32)


def root_hash(parts: Iterable[str]) -> PrefixHash:
    """Return the name of the empty prefix under what `parts` say, in this order."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        text = part.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return PrefixHash(digest.digest())


def schema_root(parts: Iterable[str]) -> PrefixHash:
    """Return `root_hash` of the parts with ROOT_SCHEMA for its first byte.

    So a directory's name tells whether any server of today reads what is in it.
    """
    return PrefixHash(bytes([ROOT_SCHEMA]) + root_hash(parts)[1:])


def key_root(root: PrefixHash, key: str) -> PrefixHash:
    """Return the name of the empty prefix for one API key, by its digest: they share nothing."""
    return root_hash([root.hex(), key])


def adapter_root(root: PrefixHash, identity: str) -> PrefixHash:
    """Return the name of the empty prefix under an adapter of these bytes.

    What other adapters, or none, made of the same tokens is other KV: they share nothing.
    """
    return root_hash([root.hex(), "adapter", identity])


def prefix_hashes(root: PrefixHash, tokens: Tokens, ends: Sequence[int]) -> list[PrefixHash]:
    """Return the name of `tokens[:end]` for each of the ascending `ends`."""
    digest = hashlib.blake2b(root, digest_size=HASH_BYTES)
    names = []
    start = 0
    for end in ends:
        assert start <= end <= len(tokens), (start, end, len(tokens))
        digest.update(tokens[start:end].tobytes())
        names.append(PrefixHash(digest.copy().digest()))
        start = end
    return names


def common_length(one: Tokens, other: Tokens) -> int:
    """Return how many leading tokens both share."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
