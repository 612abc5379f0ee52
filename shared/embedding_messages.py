"""Defines what the proxy and the process that embeds tell each other, and carries it over a pipe.

The proxy sends Embed, Rerank, CancelJob and ShortTurns. The process answers each of the first two
with exactly one Embedded, Reranked or Refused, unless it was cancelled or the process ends. A
frame is its length in four bytes, then msgpack.
"""

import dataclasses
import struct
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgpack

from hearth.shared.errors import WireError

FRAME_BYTES_MAX: Final = 1 << 30
LENGTH_BYTES: Final = 4
_LENGTH: Final = struct.Struct("<I")

EmbeddingInput: TypeAlias = str | list[int]  # a text, or the token ids of one


@dataclass(frozen=True, slots=True)
class Embed:
    """From the proxy: give a vector for each text."""

    request_id: int
    texts: list[EmbeddingInput]
    dimensions: int | None  # of a vector; None = all that the model has
    truncate: bool  # a text that is too long is cut instead of refused


@dataclass(frozen=True, slots=True)
class Rerank:
    """From the proxy: tell of each document how much it answers the query."""

    request_id: int
    query: str
    documents: list[str]
    truncate: bool


@dataclass(frozen=True, slots=True)
class CancelJob:
    """From the proxy: nobody waits for this request any more. Nothing answers it."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ShortTurns:
    """From the proxy: whether answers stream, beside which this process takes short turns."""

    are_wanted: bool


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """What is known of a loaded model that embeds or ranks."""

    architecture: str
    tokens_max: int  # of a text, or of a query and a document together
    weight_bytes: int
    dimensions: int = 0  # of a vector; 0 = it ranks
    pooling: str = ""  # "mean", "cls", "lasttoken" or "max"; "" = it ranks


@dataclass(frozen=True, slots=True)
class Loaded:
    """From the process: its models are in memory. None = it was told none of that kind."""

    embedding: dict[str, Any] | None  # EncoderFacts
    rerank: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class CannotLoad:
    """From the process, before it ends: why its models cannot be loaded."""

    text: str


@dataclass(frozen=True, slots=True)
class Computing:
    """From the process: the next forward is this request's. If the process dies, that did it."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Embedded:
    """From the process: the vectors of an Embed, and how many tokens each text is."""

    request_id: int
    vectors: bytes  # float32, little endian, one text after the other
    dimensions: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Reranked:
    """From the process: a score from 0 to 1 for each document of a Rerank."""

    request_id: int
    scores: list[float]
    tokens: int  # of all documents, each with its query


@dataclass(frozen=True, slots=True)
class Refused:
    """From the process: a request cannot be computed as it was asked."""

    request_id: int
    text: str
    status: int
    code: str
    param: str | None


EmbeddingMessage: TypeAlias = (
    Embed
    | Rerank
    | CancelJob
    | ShortTurns
    | Loaded
    | CannotLoad
    | Computing
    | Embedded
    | Reranked
    | Refused
)
_KINDS: Final[dict[str, Any]] = {
    kind.__name__: kind
    for kind in (
        *(Embed, Rerank, CancelJob, ShortTurns),
        *(Loaded, CannotLoad, Computing, Embedded, Reranked, Refused),
    )
}


def encode(message: EmbeddingMessage) -> bytes:
    """Return the frame of a message.

    Raises:
        WireError: a text holds half of a surrogate pair, an id is beyond 64 bits, or the frame is
            longer than FRAME_BYTES_MAX.
    """
    fields = [getattr(message, field.name) for field in dataclasses.fields(message)]
    try:
        body: bytes = msgpack.packb([type(message).__name__, *fields])
    except (OverflowError, ValueError) as error:  # a UnicodeEncodeError is one
        raise WireError(f"{type(message).__name__} cannot be sent: {error}") from error
    if len(body) > FRAME_BYTES_MAX:
        raise WireError(f"frame is {len(body):,} bytes; the limit is {FRAME_BYTES_MAX:,}")
    return _LENGTH.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """Return how many bytes follow the first four of a frame. Raises WireError: too many."""
    length: int = _LENGTH.unpack(head)[0]
    if length > FRAME_BYTES_MAX:
        raise WireError(f"frame is {length:,} bytes; the limit is {FRAME_BYTES_MAX:,}")
    return length


def decode(body: bytes) -> EmbeddingMessage:
    """Return the message in a frame's body. Raises WireError: it is none that this side knows."""
    try:
        kind, *fields = msgpack.unpackb(body)
        message: EmbeddingMessage = _KINDS[kind](*fields)
    except Exception as error:  # msgpack raises ValueError and its kin by many names
        raise WireError(f"no message of this version: {type(error).__name__}") from error
    return message
