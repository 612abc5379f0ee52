"""Defines the format of KV files: names a record's file, encodes the record, and decodes it.

Plain functions, no owner. A file's name identifies the record, so a record is found without opening
a file. A name on disk proves nothing: the metadata in the file must agree with the name.

A file is valid safetensors: the header's length (8 bytes), a JSON header, the arrays' bytes. The
header begins with a checksum over the rest of the file, which is checked before the header is
parsed. The header's `__metadata__` names the record, so that an undamaged file under a wrong name
is rejected. The checksum is xxh3 of 128 bits, which is much faster (21 GB/s) than blake2b (0.5) and
sha256 (0.9). The checksum detects damage, not forgery: a user who can write into a 0700 directory
could also change the model.
Source: https://github.com/huggingface/safetensors#format
"""

import base64
import binascii
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from errno import ELOOP
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from hearth.worker.cache.block_hash import HASH_BYTES, ROOT_SCHEMA, PrefixHash, Tokens

SUFFIX: Final = ".safetensors"
TEMP_PREFIX: Final = ".writing-"  # beginning of the names of unfinished files

RULE_LENGTH_MAX: Final = 24  # most characters of a cut rule's label
FAST: Final = "fast"

_HEX: Final = f"[0-9a-f]{{{2 * HASH_BYTES}}}"
_ROOT: Final = re.compile(_HEX)
_FILE: Final = re.compile(
    rf"(rows|window|state)-(fast|canonical\.([a-z0-9.]{{0,{RULE_LENGTH_MAX}}}))"
    rf"-([1-9][0-9]{{0,8}})-({_HEX})-({_HEX}){SUFFIX}"
)

SCHEMA: Final = "1"
HEADER_BYTES_MAX: Final = 16 * 1024 * 1024  # room for three million tokens
POSITION_MAX: Final = 1 << 40  # tokens
IO_BYTES_MAX: Final = 1 << 30  # most bytes of one read or write: macOS refuses two gigabytes
ALIGNMENT: Final = 64  # alignment of the data in the file, and of the views in the buffer, in bytes

# bfloat16 is stored as uint16 bits: numpy has no bfloat16.
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_),
    **{"U8": np.dtype(np.uint8), "I8": np.dtype(np.int8)},
    **{"U16": np.dtype("<u2"), "I16": np.dtype("<i2")},
    **{"BF16": np.dtype("<u2"), "F16": np.dtype("<f2")},
    **{"U32": np.dtype("<u4"), "I32": np.dtype("<i4"), "F32": np.dtype("<f4")},
    **{"U64": np.dtype("<u8"), "I64": np.dtype("<i8"), "F64": np.dtype("<f8")},
}

Metadata = dict[str, str]

_LENGTH_BYTES: Final = 8
_OPENING: Final = b'{"__metadata__":{"checksum":"'
_CHECKSUM_FROM: Final = _LENGTH_BYTES + len(_OPENING)
_CHECKSUM_TO: Final = _CHECKSUM_FROM + 2 * xxh3_128().digest_size
_UNSIGNED: Final = "0" * (_CHECKSUM_TO - _CHECKSUM_FROM)


class FileKind(StrEnum):
    """The kinds of record."""

    ROWS = "rows"  # an extent's rows in layers that keep every token, if the model has such layers
    WINDOW = "window"  # an extent's rows in window layers
    STATE = "state"  # the snapshot at an extent's end


@dataclass(frozen=True, slots=True)
class FileName:
    """The name of a record of the extent from `start` to `end`, which has `token_count` tokens.

    `rule` is the label of the cut rule by which the KV was made ("" = fast KV). `is_canonical`
    says whether this server cuts by the same rule.
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
        """The part of the file name for the cut rule by which the KV was made."""
        return f"canonical.{self.rule}" if self.is_canonical or self.rule else FAST

    @property
    def file_name(self) -> str:
        ends = f"{self.start.hex()}-{self.end.hex()}"
        return f"{self.kind}-{self.quality}-{self.token_count}-{ends}{SUFFIX}"


def parse(file_name: str, rule: str) -> FileName | None:
    """Return the name of the record in the file `file_name`; None if the file is no KV file.

    `rule` is the label of this server's cut rule.
    """
    match = _FILE.fullmatch(file_name)
    if match is None:
        return None
    kind, quality, label, count, start, end = match.groups()
    if start == end or (label == "" and rule):
        return None
    is_canonical = quality != FAST and label == rule
    first, last = (PrefixHash(bytes.fromhex(prefix)) for prefix in (start, end))
    return FileName(FileKind(kind), first, last, int(count), is_canonical, label or "")


def is_root(directory_name: str) -> bool:
    """Whether a directory with this name holds the files of a root."""
    return _ROOT.fullmatch(directory_name) is not None


def is_of_today(root: str) -> bool:
    """Whether a root has the current ROOT_SCHEMA, the only one that this version reads."""
    return root.startswith(f"{ROOT_SCHEMA:02x}")


class Damaged(Exception):
    """A file does not hold the record of its name. `reason` is one of a few words, for counters."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail:.200}")  # a detail may quote a long file header
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class Array:
    """One array. `dtype` is a type's name in safetensors; `values` have the type in `DTYPES`."""

    name: str
    dtype: str
    values: NDArray[Any] = field(repr=False)

    def __post_init__(self) -> None:
        assert self.name != "__metadata__"
        assert self.values.dtype == DTYPES[self.dtype], (self.values.dtype, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """The KV of one file: rows or window rows of an extent, or the snapshot at its end.

    `tokens` are the extent's tokens, `position` is the start of the extent, `rule` is the rule of
    the FileName. `source` holds the rows or states that the record was made from, and is not
    stored in the file. The arrays never change.
    """

    root: PrefixHash
    start: PrefixHash
    end: PrefixHash
    position: int
    tokens: Tokens = field(repr=False)
    is_canonical: bool
    kind: FileKind
    arrays: tuple[Array, ...] = ()
    rule: str = ""
    source: object = field(default=None, repr=False)

    def __post_init__(self) -> None:
        assert self.tokens.dtype == np.int32 and self.tokens.ndim == 1 and len(self.tokens) > 0
        assert self.start != self.end and 0 <= self.position <= POSITION_MAX
        assert len({array.name for array in self.arrays}) == len(self.arrays)

    @property
    def name(self) -> FileName:
        count = len(self.tokens)
        return FileName(self.kind, self.start, self.end, count, self.is_canonical, self.rule)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + sum(array.values.nbytes for array in self.arrays)


# ---------------------------------------------------------------- writing


def encode(record: Record) -> list[memoryview]:
    """Return the file's bytes in order: the header, then views of the arrays.

    Only an array that is not contiguous is copied.
    """
    contiguous = (np.ascontiguousarray(array.values) for array in record.arrays)
    data = [values.reshape(-1).view(np.uint8).data for values in contiguous]
    header = _header(record)
    checksum = _checksum(memoryview(header), data).encode()
    header = header[:_CHECKSUM_FROM] + checksum + header[_CHECKSUM_TO:]
    assert len(header) % ALIGNMENT == 0, len(header)
    return [memoryview(header), *data]


def write(handle: int, parts: Iterable[memoryview]) -> None:
    """Write the bytes of a file.

    Raises:
        OSError: not all bytes could be written.
    """
    for part in parts:
        while len(part):
            part = part[os.write(handle, part[:IO_BYTES_MAX]) :]


def _header(record: Record) -> bytes:
    """Return the header's length and the header, with zeros in place of the checksum."""
    metadata = {
        "checksum": _UNSIGNED,  # first, because `_OPENING` has this key
        "schema": SCHEMA,
        "kind": record.kind,
        "quality": record.name.quality,
        "root": record.root.hex(),
        "start": record.start.hex(),
        "end": record.end.hex(),
        "position": str(record.position),
        "tokens": base64.b64encode(record.tokens.astype("<i4").tobytes()).decode(),
    }
    fields: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for array in record.arrays:
        end = offset + array.values.nbytes
        fields[array.name] = {
            "dtype": array.dtype,
            "shape": list(array.values.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT)
    assert text.startswith(_OPENING) and len(text) <= HEADER_BYTES_MAX, len(text)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _checksum(head: memoryview, rest: Iterable[memoryview]) -> str:
    """Return the checksum of a file: of `head`, at least the whole header, and of `rest`."""
    digest = xxh3_128(head[:_CHECKSUM_FROM])
    digest.update(head[_CHECKSUM_TO:])
    for part in rest:
        digest.update(part)
    return digest.hexdigest()


# ---------------------------------------------------------------- reading


def read(path: Path, root: PrefixHash, name: FileName, bytes_max: int) -> Record:
    """Return the record of the file at `path`, which must be record `name` under `root`.

    The file is read into one buffer, and the arrays are views of that buffer. A file larger than
    `bytes_max` is not read.

    Raises:
        Damaged: the file is not the undamaged file of this record.
        OSError: the disk cannot read the file; FileNotFoundError: there is no such file.
    """
    return decode(_whole_file(path, bytes_max), root, name)


def _whole_file(path: Path, bytes_max: int) -> NDArray[np.uint8]:
    try:
        # The flags keep the call from hanging on a fifo and from following a link.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == ELOOP:
            raise Damaged("foreign", "a link") from error
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged("foreign", "no plain file")
        if status.st_size > bytes_max:
            raise Damaged("size", f"{status.st_size:,} bytes of at most {bytes_max:,}")
        buffer = np.empty(status.st_size, np.uint8)
        view, count = buffer.data, 0
        while count < len(view) and (
            more := os.readv(handle, [view[count : count + IO_BYTES_MAX]])
        ):
            count += more
        if count < len(view):
            raise Damaged("truncated", f"it shrank from {len(view):,} to {count:,} bytes")
        return buffer
    finally:
        os.close(handle)


def decode(buffer: NDArray[np.uint8], root: PrefixHash, name: FileName) -> Record:
    """Return the record of the file in `buffer`. The record's arrays are views of the buffer.

    Raises:
        Damaged: the buffer is not the undamaged file of record `name` under `root`.
    """
    data_from = _check_sum(buffer)
    header = _json_object(bytes(buffer[_LENGTH_BYTES:data_from]))
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Damaged("header", "its metadata are not strings")
    if (schema := metadata.get("schema")) != SCHEMA:
        raise Damaged("schema", f"{schema!r}, and this server reads {SCHEMA!r}")
    tokens = _tokens(metadata)
    _check_names(metadata, len(tokens), root, name)
    position = metadata.get("position", "")
    if re.fullmatch(r"[0-9]{1,13}", position) is None or int(position) > POSITION_MAX:
        raise Damaged("header", "its position is no number")
    return Record(
        root=root,
        start=name.start,
        end=name.end,
        position=int(position),
        tokens=tokens,
        is_canonical=name.is_canonical,
        kind=name.kind,
        arrays=tuple(_arrays(header, buffer[data_from:])),
        rule=name.rule,
    )


def _check_sum(buffer: NDArray[np.uint8]) -> int:
    """Verify the checksum; return the position at which the data begins."""
    head = buffer.data
    if len(head) < _CHECKSUM_TO:
        raise Damaged("truncated", f"{len(head)} bytes")
    data_from = _LENGTH_BYTES + int.from_bytes(head[:_LENGTH_BYTES], "little")
    if bytes(head[_LENGTH_BYTES:_CHECKSUM_FROM]) != _OPENING:
        raise Damaged("foreign", "its header does not begin as ours do")
    if data_from > len(head):
        raise Damaged("truncated", f"the header ends at {data_from:,} of {len(head):,} bytes")
    if not _CHECKSUM_TO < data_from <= _LENGTH_BYTES + HEADER_BYTES_MAX:
        raise Damaged("size", f"a header of {data_from - _LENGTH_BYTES:,} bytes")
    if _checksum(head, ()).encode() != bytes(head[_CHECKSUM_FROM:_CHECKSUM_TO]):
        raise Damaged("checksum", f"of {len(head):,} bytes")
    return data_from


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged("header", "no JSON") from error
    if not isinstance(header, dict):
        raise Damaged("header", "no object")
    return header


def _tokens(metadata: Metadata) -> Tokens:
    try:
        packed = base64.b64decode(metadata.get("tokens", "").encode(), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise Damaged("header", "its tokens are no base64") from error
    if not packed or len(packed) % 4:
        raise Damaged("header", f"its tokens are {len(packed)} bytes")
    return np.frombuffer(packed, "<i4").astype(np.int32, copy=False)


def _check_names(metadata: Metadata, token_count: int, root: PrefixHash, name: FileName) -> None:
    if metadata.get("root") != root.hex():
        raise Damaged("root", f"of {metadata.get('root')!r}, not {root.hex()}")
    expected = {
        "kind": name.kind,
        "quality": name.quality,
        "start": name.start.hex(),
        "end": name.end.hex(),
    }
    wrong = [item for item, value in expected.items() if metadata.get(item) != value]
    if token_count != name.token_count:
        wrong.append("token count")
    if wrong:
        raise Damaged("name", f"the file's own {', '.join(wrong)} are others")


def _arrays(header: dict[str, Any], data: NDArray[np.uint8]) -> Iterator[Array]:
    """Yield the arrays as views of `data`, in order; the arrays must cover `data` without gaps."""
    offset = 0
    for name, entry in header.items():
        dtype, shape, count = _layout(name, entry)
        end = offset + count * DTYPES[dtype].itemsize
        if entry.get("data_offsets") != [offset, end] or end > len(data):
            raise Damaged("layout", f"array {name!r} is not at {offset:,} to {end:,}")
        try:
            values = data[offset:end].view(DTYPES[dtype]).reshape(shape)
        except ValueError as error:  # an empty array with sizes too large for numpy
            raise Damaged("layout", f"array {name!r} has an absurd shape") from error
        yield Array(name, dtype, values)
        offset = end
    if offset != len(data):
        raise Damaged("layout", f"arrays of {offset:,} bytes in {len(data):,}")


def _layout(name: str, entry: Any) -> tuple[str, list[int], int]:
    """Return the dtype, the shape and the number of elements from an array's header entry."""
    if not isinstance(entry, dict):
        raise Damaged("layout", f"array {name!r} is not described")
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Damaged("layout", f"array {name!r} has no known type")
    if (
        not isinstance(shape, list)
        or len(shape) > 32
        or not all(type(size) is int and 0 <= size < 1 << 40 for size in shape)
    ):
        raise Damaged("layout", f"array {name!r} has no shape")
    return dtype, shape, math.prod(shape)
