"""Defines the messages by which workers that share no directory hand kept KV to each other.

All go through the proxy: a worker knows no other. Prefixes are told by their portable names:
chained hashes that begin with the weights and the API key's root, so that nobody finds, or is told
of, what another key's prompts left. `wire_messages` carries them.
"""

from dataclasses import dataclass
from typing import Final

CHUNK_BYTES: Final = (
    2 * 1024 * 1024
)  # of a file at once: the proxy passes it on within milliseconds
SEEK_NAMES_MAX: Final = 1024  # cuts of a prompt, some hundreds of tokens apart
HELD_NAMES_MAX: Final = 4096  # that a worker tells, and a proxy remembers of each worker
MOVED_FILES_MAX: Final = 4096  # of one prompt


@dataclass(frozen=True, slots=True)
class TellHeld:
    """Proxy to worker: others keep KV elsewhere, so tell what is held here, and seek what is not.

    Answered by Holds, now and once a second where something has changed.
    """


@dataclass(frozen=True, slots=True)
class Holds:
    """Worker to proxy: the prefixes whose KV it has kept since, and those it has no more."""

    added: list[bytes]
    dropped: list[bytes]


@dataclass(frozen=True, slots=True)
class Seek:
    """Asks for the KV of the first of `names` that is held: worker to proxy, and that to a holder.

    Answered by Found.
    """

    seek_id: str
    names: list[bytes]  # the longest prefix first


@dataclass(frozen=True, slots=True)
class Found:
    """Says in which files the KV of the prefix `name` is; b"" = nobody has it, or has it any more.

    `root` is what the holder's files are named under, `files` are their names in an order in which
    they can be taken in. The proxy adds whose they are.
    """

    seek_id: str
    name: bytes
    root: bytes
    files: list[str]
    sizes: list[int]  # of the files, in bytes
    holder: int = -1

    @classmethod
    def nobody(cls, seek_id: str) -> "Found":
        return cls(seek_id, b"", b"", [], [])


@dataclass(frozen=True, slots=True)
class Fetch:
    """Asks for `nbytes` of one of the files of a Found, from `offset` on. Answered by Chunk."""

    seek_id: str
    file: int
    offset: int
    nbytes: int  # CHUNK_BYTES at most


@dataclass(frozen=True, slots=True)
class Chunk:
    """Brings what was asked for of a file; b"" = it is not to be had any more."""

    seek_id: str
    file: int
    offset: int
    data: bytes


KVMove = Holds | Seek | Found | Fetch | Chunk
