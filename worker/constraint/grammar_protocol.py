"""Names what the worker asks its grammar processes, and their limits. Both sides import it."""

import socket
import struct
from collections.abc import Sequence
from typing import Final

# What is asked, in front of what it is about.
FORK: Final = b"F"  # make a process that goes on from here
LOAD: Final = b"L"  # read a tokenizer
COMPILE: Final = b"C"  # compile a grammar, tell its first mask
TRY: Final = b"T"  # compile a grammar and write random answers with it
HELD: Final = b"H"  # tell how much memory it took
STEP: Final = b"S"  # go on by tokens, tell the mask of the next one
DRAFT: Final = b"D"  # go on by tokens, tell the masks behind each part of a draft that fits
FORCED: Final = b"N"  # go on by tokens, tell those that have to come next

# What is answered, in front of a mask or a text.
OK: Final = b"+"
SOUND: Final = b"+"  # in front of a draft's masks, or forced tokens: the process can go on
BROKEN: Final = b"-"  # looking ahead has broken the grammar: what was told is right yet
ERROR: Final = b"-"  # llguidance's words against the grammar, or the system's against a process
TOO_LARGE: Final = b"!"  # memory

COMPILE_CPU_S: Final = 1.0  # for all that is compiled for one request
STEP_CPU_S: Final = 0.5  # for one step of an answer: what its tokens may save up
STEP_REFILL_CPU_S: Final = 0.02  # that each token of it adds
DRAFT_CPU_S: Final = STEP_REFILL_CPU_S  # for one look ahead, behind which the draft is cut
MEMORY_BYTES_MAX: Final = 512 * 1024 * 1024  # beyond what the model's tokens take
SEND_S_MAX: Final = 10  # for each part of a message that the worker sends
RECEIVE_S_MAX: Final = 2  # for the rest of one that has begun to come


def bound_waits(end: socket.socket) -> None:
    """Bound what the worker's end of a connection waits to send, or for the rest of a message."""
    for option, seconds in (socket.SO_SNDTIMEO, SEND_S_MAX), (socket.SO_RCVTIMEO, RECEIVE_S_MAX):
        end.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, 0))


def pack_tokens(*parts: Sequence[int]) -> bytes:
    """Return the number of tokens in the first part, and all parts' tokens."""
    tokens = [token for part in parts for token in part]
    return struct.pack(f"<I{len(tokens)}I", len(parts[0]), *tokens)


def unpack_tokens(packed: bytes) -> tuple[list[int], list[int]]:
    """Return the tokens of the first part, and those of the others."""
    count, *tokens = struct.unpack(f"<{len(packed) // 4}I", packed)
    return tokens[:count], tokens[count:]
