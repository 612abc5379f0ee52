"""Names what the worker asks its grammar processes, and their limits. Both sides import it."""

import socket
import struct
from typing import Final

# What is asked, in front of what it is about.
FORK: Final = b"F"  # make a process that goes on from here
LOAD: Final = b"L"  # read a tokenizer
COMPILE: Final = b"C"  # compile a grammar, tell its first mask
TRY: Final = b"T"  # compile a grammar and write random answers with it
STEP: Final = b"S"  # go on by tokens, tell the mask of the next one

# What is answered, in front of a mask or a text.
OK: Final = b"+"
ERROR: Final = b"-"  # llguidance's words against the grammar, or the system's against a process
TOO_LARGE: Final = b"!"  # memory

COMPILE_CPU_S: Final = 1.0  # for all that is compiled for one request
STEP_CPU_S: Final = 0.5  # for one step of an answer: what its tokens may save up
STEP_REFILL_CPU_S: Final = 0.02  # that each token of it adds
MEMORY_BYTES_MAX: Final = 512 * 1024 * 1024  # beyond what the model's tokens take
SEND_S_MAX: Final = 10  # for each part of a message that the worker sends
RECEIVE_S_MAX: Final = 2  # for the rest of one that has begun to come


def bound_waits(end: socket.socket) -> None:
    """Bound what the worker's end of a connection waits to send, or for the rest of a message."""
    for option, seconds in (socket.SO_SNDTIMEO, SEND_S_MAX), (socket.SO_RCVTIMEO, RECEIVE_S_MAX):
        end.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, 0))
