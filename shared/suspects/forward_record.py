"""Holds, in a file that outlives its worker, the requests whose forward a worker runs.

The worker writes it through a memory map, without a system call; the supervisor reads it when the
worker has died. There are two halves: a write fills the one that does not count and then has it
count by one byte, so that a death amid a write leaves the write before. A checksum tells a half
that no writer has filled.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

ForwardKind = Literal["admit", "prefill", "image", "decode", "idle"]

ROWS_MAX: Final = 80  # MAX_CONCURRENT_REQUESTS is 64 at most; one is read beside them
NAME_BYTES: Final = 16
NO_NAME: Final = b"\0" * NAME_BYTES
SUFFIX: Final = ".forward"

_KINDS: Final[tuple[ForwardKind, ...]] = get_args(ForwardKind)
_MAGIC: Final = b"HEARTHF1"
_ROW: Final = struct.Struct(f"<64s{NAME_BYTES}s{NAME_BYTES}s{NAME_BYTES}sIIBB")
_HALF: Final = struct.Struct("<IH")  # checksum, rows
_STEPS: Final = struct.Struct("<I")
_ACTIVE_AT: Final = len(_MAGIC)
_HALVES_AT: Final = 16
_HALF_BYTES: Final = _STEPS.size + _HALF.size + ROWS_MAX * _ROW.size
FILE_BYTES: Final = _HALVES_AT + 2 * _HALF_BYTES


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """One request in a forward. Names are opaque: see `suspect_store`.

    `tokens` is how far its sequence is: to the end of the forward's cut, or with what was decoded.
    """

    request_id: str  # "" of work in idle time
    name: bytes  # of the tokens that are suspected if this forward ends the worker
    owner: bytes  # whose request it is
    length: int  # how many tokens `name` names
    tokens: int
    kind: ForwardKind
    is_alone: bool = False  # it is a suspect, and no other request is in this worker's forwards
    suspect: bytes = NO_NAME  # the suspicion that it is retried under

    def packed(self, more_tokens: int = 0, *, is_sole: bool = True) -> bytes:
        """Return its bytes, with `more_tokens`; it is alone only if it `is_sole`."""
        return _ROW.pack(
            self.request_id.encode()[:64],
            self.name,
            self.owner,
            self.suspect,
            self.length,
            self.tokens + more_tokens,
            _KINDS.index(self.kind),
            self.is_alone and is_sole,
        )


def record_path(socket_path: Path) -> Path:
    return socket_path.with_suffix(SUFFIX)


class ForwardRecord:
    """Writes the file of one worker. Owner: the inference thread. No method makes a system call.

    Invariant: whenever the process ends, the file holds the rows of one `write`, whole.
    """

    def __init__(self, path: Path) -> None:
        """Make the file anew. Raises: OSError."""
        path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path, flags, 0o600)
        try:
            os.write(handle, b"\0" * FILE_BYTES)  # a hole could lack its disk block later
            self._map = mmap.mmap(handle, FILE_BYTES)
        finally:
            os.close(handle)
        self._active = 0
        self.write(())
        self._map[: len(_MAGIC)] = _MAGIC

    def write(self, rows: Sequence[bytes]) -> None:
        """Have the file name these packed rows, in place of all before; further ones are left out.

        Their steps begin at 0.
        """
        body = b"".join(rows[:ROWS_MAX])
        half = 1 - self._active
        at = _half_at(half)
        head = _STEPS.pack(0) + _HALF.pack(zlib.crc32(body), len(body) // _ROW.size)
        self._map[at : at + len(head) + len(body)] = head + body
        self._map[_ACTIVE_AT] = half
        self._active = half

    def note_steps(self, steps: int) -> None:
        """Have each row's `tokens` be more by `steps`, since it was written."""
        _STEPS.pack_into(self._map, _half_at(self._active), steps)

    def close(self) -> None:
        self._map.close()


def read_record(path: Path) -> list[ForwardRow]:
    """Return the rows that a worker left; none where it left none, or nothing that can be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        return decode_record(os.read(handle, FILE_BYTES + 1))
    except OSError:
        return []
    finally:
        os.close(handle)


def decode_record(data: bytes) -> list[ForwardRow]:
    """Return the rows in the bytes of a file; none where they are no such file's."""
    if len(data) != FILE_BYTES or data[: len(_MAGIC)] != _MAGIC or data[_ACTIVE_AT] > 1:
        return []
    at = _half_at(data[_ACTIVE_AT])
    (steps,) = _STEPS.unpack_from(data, at)
    checksum, count = _HALF.unpack_from(data, at + _STEPS.size)
    begin = at + _STEPS.size + _HALF.size
    body = data[begin : begin + count * _ROW.size]
    if count > ROWS_MAX or zlib.crc32(body) != checksum:
        return []
    try:
        return [_row(fields, steps) for fields in _ROW.iter_unpack(body)]
    except (IndexError, UnicodeDecodeError):
        return []


def _row(fields: tuple[bytes, bytes, bytes, bytes, int, int, int, int], steps: int) -> ForwardRow:
    request_id, name, owner, suspect, length, tokens, kind, is_alone = fields
    return ForwardRow(
        request_id.rstrip(b"\0").decode(),
        name,
        owner,
        length,
        tokens + steps,
        _KINDS[kind],
        bool(is_alone),
        suspect,
    )


def _half_at(half: int) -> int:
    return _HALVES_AT + half * _HALF_BYTES
