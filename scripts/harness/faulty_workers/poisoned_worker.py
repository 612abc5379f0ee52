"""Runs a real worker that breaks amid the forward of a request whose prompt shows a mark.

It is started in place of `hearth.worker.main`, with the same arguments, and needs no settings:

    OwnServer(settings, worker="scripts.harness.faulty_workers.poisoned_worker")  # scripts/faults
    main([sys.executable, "-m", "scripts.harness.faulty_workers.poisoned_worker"])

A mark is a text in any message, `poison-HOW-WHEN!`, or `poison-HOW-WHEN-TIMES!`:

    HOW    raise      an exception on the inference thread
           sigkill, sigsegv, sigabrt    the process sends itself that signal
           hang       the forward never ends
    WHEN   prefill    the forward that reads the mark's end
           large      the same, if that forward reads more than 64 tokens
           decode     a step behind the answer's fourth token
    TIMES  how often at all, counted in RUN_DIR over restarts; without it always

So `poison-sigsegv-prefill!` breaks each worker that reads it, `poison-raise-decode-1!` the first.
A mark whose KV is kept is not read, and breaks nothing.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn
from unittest import mock

from hearth.worker.engine.engine import Engine
from hearth.worker.schedule.prefill_forwards import PrefillForwards
from hearth.worker.schedule.request_state import Request
from hearth.worker.schedule.scheduler import Scheduler

MARK: Final = re.compile(
    r"poison-(raise|sigkill|sigsegv|sigabrt|hang)-(prefill|large|decode)(?:-(\d+))?!"
)
MARK_TOKENS_MAX: Final = 64  # of a mark that begins in the forward before
LARGE_TOKENS: Final = 64
DECODED_TOKENS: Final = 4


class Poisoned(Exception):
    """The model does not take these tokens."""


class Mark(NamedTuple):
    """How, when and how often a worker breaks."""

    text: str
    how: str
    when: str
    times_max: int | None


def marks_in(text: str, start: int = 0) -> Iterator[Mark]:
    """Yield the marks in `text` that end behind the character `start`."""
    for found in MARK.finditer(text):
        if found.end() > start:
            times_max = int(found[3]) if found[3] else None
            yield Mark(found[0], found[1], found[2], times_max)


class PoisonedForwards:
    """Breaks the process as the marks of the tokens in a forward say. Owner: the inference thread.

    Invariant: a mark breaks at most as often as it says, over all processes with one `directory`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._decode: Callable[[Sequence[int]], str] = lambda _: ""

    def learn(self, vocabulary: Any) -> None:
        """Take how token ids become text from the loaded model."""

        def decode(ids: Sequence[int]) -> str:
            return b"".join(map(vocabulary.token_bytes, ids)).decode(errors="replace")

        self._decode = decode

    def read(self, ids: Sequence[int], start: int, end: int) -> None:
        """Break where the forward of ids[start:end] reads the end of a mark."""
        first = max(0, start - MARK_TOKENS_MAX)
        known = len(self._decode(ids[first:start]))
        for mark in marks_in(self._decode(ids[first:end]), known):
            if mark.when == "prefill" or (mark.when == "large" and end - start > LARGE_TOKENS):
                self._break(mark)

    def decoded(self, ids: Sequence[int]) -> None:
        """Break where a prompt that is answered shows a mark."""
        for mark in marks_in(self._decode(ids)):
            if mark.when == "decode":
                self._break(mark)

    def _break(self, mark: Mark) -> None:
        if mark.times_max is not None:
            path = self._directory / f"{mark.text.rstrip('!')}.count"
            times = path.stat().st_size if path.exists() else 0
            if times >= mark.times_max:
                return
            path.write_bytes(b"." * (times + 1))
        _end(mark)


def _end(mark: Mark) -> NoReturn:
    if mark.how == "raise":
        raise Poisoned(f"{mark.text} is in the forward")
    if mark.how != "hang":
        os.kill(os.getpid(), signal.Signals[mark.how.upper()])
    while True:
        time.sleep(60)


def poison(directory: Path) -> None:
    """Have every forward of this process look for marks; counts go into `directory`."""
    forwards = PoisonedForwards(directory)
    init: Callable[..., None] = Scheduler.__init__
    chunk: Callable[..., None] = PrefillForwards._prefill_chunk
    decode: Callable[..., Any] = Scheduler._decode
    prefill: Callable[..., None] = Engine.prefill
    reading: list[Request] = []  # whose chunk is prefilled now

    def new_init(
        self: Scheduler, engine: Any, kv_manager: Any, vocabulary: Any, *rest: Any
    ) -> None:
        forwards.learn(vocabulary)
        init(self, engine, kv_manager, vocabulary, *rest)

    def new_chunk(self: PrefillForwards, request: Request, *rest: Any) -> None:
        reading[:] = [request]
        chunk(self, request, *rest)
        reading.clear()

    def new_prefill(self: Engine, cache: Any, ids: list[int], *rest: Any) -> None:
        for request in reading:
            forwards.read(request.ids, request.position, request.position + len(ids))
        prefill(self, cache, ids, *rest)

    def new_decode(self: Scheduler) -> Any:
        for request in self._decoding.values():
            if request.completion_tokens == DECODED_TOKENS:
                forwards.decoded(request.ids)
        return decode(self)

    for owner, name, new in (
        (Scheduler, "__init__", new_init),
        (PrefillForwards, "_prefill_chunk", new_chunk),
        (Scheduler, "_decode", new_decode),
        (Engine, "prefill", new_prefill),
    ):
        mock.patch.object(owner, name, new).start()


def main() -> int:
    endpoint = sys.argv[sys.argv.index("--endpoint") + 1]
    poison(Path(endpoint.removeprefix("ipc://")).parents[1])  # RUN_DIR, which outlives all
    from hearth.worker import main as real  # only now: its modules take what they need by name

    return real.main()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads that use MLX must not outlive the interpreter
