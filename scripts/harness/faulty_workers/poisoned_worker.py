"""Runs a real worker that breaks amid the forward of a request whose prompt shows a mark.

It is started in place of `hearth.worker.main`, with the same arguments, and needs no settings:

    OwnServer(settings, worker="scripts.harness.faulty_workers.poisoned_worker")  # scripts/faults
    main([sys.executable, "-m", "scripts.harness.faulty_workers.poisoned_worker"])

A mark is a text in any message, `poison-HOW-WHEN!`, or `poison-HOW-WHEN-TIMES!`:

    HOW    raise      an exception on the inference thread
           sigkill, sigsegv, sigabrt    the process sends itself that signal
           hang       the forward never ends
    WHEN   prefill    the forward that reads the mark's end
           decode     a step behind the answer's fourth token
    TIMES  how often at all, counted in RUN_DIR over restarts; without it always

So `poison-sigsegv-prefill!` breaks each worker that reads it, `poison-raise-decode-1!` the first.
A mark whose KV is kept is not read, and breaks nothing.
"""

import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Final
from unittest import mock

from hearth.worker.engine.engine import Engine
from hearth.worker.schedule.prefill_forwards import PrefillForwards
from hearth.worker.schedule.request_state import Request
from hearth.worker.schedule.scheduler import Scheduler
from hearth.worker.stream.detokenise import Vocabulary

MARK: Final = re.compile(
    r"(?P<name>poison-(?P<how>raise|hang|sigkill|sigsegv|sigabrt)-(?P<when>prefill|decode)"
    r"(?:-(?P<times>\d+))?)!"
)
MARK_TOKENS_MAX: Final = 64  # of a mark that begins in the forward before
DECODED_TOKENS: Final = 4


def break_at(text: str, kind: str, directory: Path, start: int = 0) -> None:
    """Break where a mark of `kind` ends behind the character `start`.

    A mark breaks at most as often as it says, over all processes with one `directory`.
    """
    for mark in MARK.finditer(text):
        if mark.end() <= start or mark["when"] != kind:
            continue
        path = directory / f"{mark['name']}.count"
        times = path.stat().st_size if path.exists() else 0
        if times == int(mark["times"] or -1):
            continue
        path.write_bytes(b"." * (times + 1))
        if mark["how"] == "raise":
            raise RuntimeError(f"{mark[0]} is in the forward")
        if mark["how"] != "hang":
            os.kill(os.getpid(), signal.Signals[mark["how"].upper()])
        threading.Event().wait()


def poison(directory: Path) -> None:
    """Have every forward of this process look for marks; counts go into `directory`."""
    init, decode = Scheduler.__init__, Scheduler._decode
    chunk, prefill = PrefillForwards._prefill_chunk, Engine.prefill
    vocabularies: list[Vocabulary] = []  # of the loaded model
    reading: list[Request] = []  # whose chunk is prefilled now

    def text(ids: list[int]) -> str:
        return b"".join(map(vocabularies[0].token_bytes, ids)).decode(errors="replace")

    def new_init(self: Scheduler, *given: Any) -> None:
        vocabularies.append(given[2])
        init(self, *given)

    def new_chunk(self: PrefillForwards, request: Request, *rest: Any) -> Any:
        reading[:] = [request]
        hidden = chunk(self, request, *rest)
        reading.clear()
        return hidden

    def new_prefill(self: Engine, cache: Any, ids: list[int], *rest: Any) -> None:
        for request in reading:
            before = request.ids[: request.position][-MARK_TOKENS_MAX:]
            break_at(text(before + ids), "prefill", directory, len(text(before)))
        prefill(self, cache, ids, *rest)

    def new_decode(self: Scheduler) -> Any:
        for request in self._decoding.values():
            if request.completion_tokens == DECODED_TOKENS:
                break_at(text(request.ids), "decode", directory)
        return decode(self)

    for owner, name, new in (
        (Scheduler, "__init__", new_init),
        (PrefillForwards, "_prefill_chunk", new_chunk),
        (Scheduler, "_decode", new_decode),
        (Engine, "prefill", new_prefill),
    ):
        mock.patch.object(owner, name, new).start()


if __name__ == "__main__":
    endpoint = sys.argv[sys.argv.index("--endpoint") + 1]
    poison(Path(endpoint.removeprefix("ipc://")).parents[1])  # RUN_DIR, which outlives all
    from hearth.worker import main as real  # only now: its modules take what they need by name

    code = real.main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads that use MLX must not outlive the interpreter
