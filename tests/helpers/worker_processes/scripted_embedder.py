"""Speaks for the worker that embeds, with no model: what a text says decides what happens.

"kill" ends it by SIGKILL amid its forward, "hang" and "wait" compute without end (a "hang" says no
word any more, and a "wait" is amid no forward). All other texts get the vector (number of
characters, pid). Each request and each end is noted as a line in the file NOTES.
"""

import argparse
import os
import queue
import signal
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hearth.shared.errors import EXIT_CANNOT_START
from hearth.shared.wire_messages import Embedded, EncoderFacts, Heartbeat, Message
from hearth.shared.worker_files import forwarded_path, leave_reason
from hearth.shared.zmq_transport import RouterPort
from hearth.worker.threads.shutdown import Shutdown
from hearth.worker.threads.wire_thread import WireThread

FACTS: Final = {"embeddings": EncoderFacts("scripted", 9, 1, 2)}


def note(line: str) -> None:
    with Path(os.environ["NOTES"]).open("a") as file:
        file.write(line + "\n")


class NotingWire(WireThread):
    """Notes what is no request."""

    def handle(self, peer: bytes, message: Message) -> None:
        super().handle(peer, message)
        if type(message).__name__ in ("Cancel", "ShortTurns"):
            note(type(message).__name__ + f"({getattr(message, 'are_wanted', '')})")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker-id", type=int)
    parser.add_argument("--endpoint")
    options = parser.parse_args()
    note(f"start {os.environ['EMBEDDING_MODEL']}")
    if (why := os.environ.get("CANNOT_LOAD")) is not None:
        if why:
            leave_reason(options.endpoint, why)
        os._exit(EXIT_CANNOT_START)
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    port = RouterPort(options.endpoint)
    shutdown = Shutdown(port.wake)
    shutdown.listen()

    def heartbeat(_: Sequence[str]) -> Heartbeat:
        return Heartbeat("ready", 1, 0, 0, 0, None, encoders=FACTS)

    wire = NotingWire(port, 0, jobs, heartbeat, 10_000)

    def compute() -> None:
        while True:
            _, asked = jobs.get()
            text = asked.texts[0]
            note(f"{text} {asked.truncate}")
            if text == "wait":
                continue
            forwarded_path(options.endpoint).write_text(asked.request_id)
            if text == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if text == "hang":
                time.sleep(3_600)
            vectors = [(float(len(text)), float(os.getpid())) for text in asked.texts]
            packed = b"".join(struct.pack("<2f", *vector) for vector in vectors)
            tokens = [len(text) for text in asked.texts]
            wire.send(Embedded(asked.request_id, packed, 2, tokens))

    threading.Thread(target=compute, daemon=True).start()
    wire.run(shutdown.is_begun)
    note("end")
    os._exit(0)


if __name__ == "__main__":
    main()
