"""Speaks for the process that embeds, with no model: what a text says decides what happens.

"kill" ends it by SIGKILL amid its forward, "hang" and "wait" compute without end (a "wait" is
cancelled as the real one is), "garbage" answers none of our frames. All other texts get the vector
(number of characters, pid). Each request is noted as a line in the file NOTES.
"""

import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Final

from hearth.shared.embedding_messages import (
    LENGTH_BYTES,
    CancelJob,
    CannotLoad,
    Computing,
    Embed,
    Embedded,
    EmbeddingMessage,
    Loaded,
    ShortTurns,
    body_length,
    decode,
    encode,
)
from hearth.shared.errors import EXIT_CANNOT_START

FACTS: Final = dict(architecture="scripted", tokens_max=9, weight_bytes=1, dimensions=2, pooling="")
HANG_S: Final = 3_600.0


def send(message: EmbeddingMessage) -> None:
    sys.stdout.buffer.write(encode(message))
    sys.stdout.buffer.flush()


def note(line: str) -> None:
    with Path(os.environ["NOTES"]).open("a") as file:
        file.write(line + "\n")


def take(message: EmbeddingMessage) -> None:
    if isinstance(message, CancelJob | ShortTurns):
        note(repr(message))
        return
    assert isinstance(message, Embed), message
    note(f"{message.texts[0]} {message.truncate}")
    if message.texts[0] == "wait":
        return
    send(Computing(message.request_id))
    if message.texts[0] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if message.texts[0] == "hang":
        time.sleep(HANG_S)
    if message.texts[0] == "garbage":
        os.write(1, b"\x02\x00\x00\x00no")
    vectors = [(float(len(text)), float(os.getpid())) for text in message.texts]
    packed = b"".join(struct.pack("<2f", *vector) for vector in vectors)
    send(Embedded(message.request_id, packed, 2, [len(text) for text in message.texts]))


def main() -> int:
    note(f"start {os.getpid()} {' '.join(sys.argv[1:])}")
    if (why := os.environ.get("CANNOT_LOAD")) is not None:
        if why:
            send(CannotLoad(why))
        return EXIT_CANNOT_START
    send(Loaded(FACTS, None))
    while len(head := sys.stdin.buffer.read(LENGTH_BYTES)) == LENGTH_BYTES:
        take(decode(sys.stdin.buffer.read(body_length(head))))
    note("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
