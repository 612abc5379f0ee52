"""Names prefixes of tokens by chained hashes over packed integers, never over text.

A block is the tokens of one prefill forward (worker/prompt/prefill_cuts.py), some hundreds of
tokens. The name of a prefix is the hash of the root and of every block in the prefix. The root is a
hash of everything that changes the KV of given tokens, so that models, settings and backends share
no KV.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NewType

import numpy as np
from numpy.typing import NDArray

PrefixHash = NewType("PrefixHash", bytes)
Tokens = NDArray[np.int32]

HASH_BYTES = 16  # so many because a collision would serve another prompt's KV
ROOT_SCHEMA = 3  # version of the kept data and of the file names


def pack(ids: Sequence[int] | Tokens) -> Tokens:
    """Return the ids in the form that is hashed and compared."""
    return np.asarray(ids, dtype=np.int32)


def root_hash(parts: Iterable[str]) -> PrefixHash:
    """Return the name of the empty prefix: the hash of `parts`, in this order."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        text = part.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return PrefixHash(digest.digest())


def schema_root(parts: Iterable[str]) -> PrefixHash:
    """Return `root_hash` of the parts, with ROOT_SCHEMA as the first byte.

    The first byte of a directory's name thus says whether this version can read the files in it.
    """
    return PrefixHash(bytes([ROOT_SCHEMA]) + root_hash(parts)[1:])


def key_root(root: PrefixHash, api_key: str) -> PrefixHash:
    """Return the name of the empty prefix for one API key's digest. API keys share no KV."""
    return root_hash([root.hex(), api_key])


def adapter_root(root: PrefixHash, identity: str) -> PrefixHash:
    """Return the name of the empty prefix for the adapter with this identity.

    The same tokens give other KV under another adapter, or without one, so adapters share no KV.
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


def common_length(first: Tokens, second: Tokens) -> int:
    """Return how many tokens at the beginning are the same in both."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length
