"""Runs a real worker whose chunks are slow, or that hangs, and notes what it does while it ends.

Each chunk of a prefill takes SLOW_CHUNK_S seconds longer, for ever where that is `inf`. To the file
SLOW_LOG it adds a line for each chunk that begins and ends, each call that concerns the device, and
its exit. It takes its device for one with a working set. It waits SLOW_WAIT_S for a chunk. While
the file HANG_WHILE exists, its inference thread hangs as it decodes, as in a stuck driver; the
others live on: heartbeats go out and say what it holds.
"""

import math
import os
import sys
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import mlx.core as mx

from hearth.shared.stop_signals import CHUNK_WAIT_S, SAY_AFTER_S
from hearth.worker import main as real
from hearth.worker.engine import engine
from hearth.worker.engine.decode.decoder import Decoder, SampledToken
from hearth.worker.engine.engine import Engine
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.setup import rank_setup
from hearth.worker.threads import shutdown

PROBE_TOKENS = 3  # of a forward that a start makes


class SlowEngine(Engine):
    """Takes long for a chunk, as a large model does."""

    def prefill(self, cache: list[Any], ids: list[int], *images: Any) -> None:
        if len(ids) > PROBE_TOKENS:
            note(f"chunk begins {len(ids)}")
            seconds = float(os.environ["SLOW_CHUNK_S"])
            threading.Event().wait(None if math.isinf(seconds) else seconds)
        super().prefill(cache, ids, *images)
        if len(ids) > PROBE_TOKENS:
            note(f"chunk ends {len(ids)}")


class HangingDecoder(Decoder):
    """Decodes nothing while it is to hang."""

    def step(self) -> list[SampledToken]:
        if os.path.exists(os.environ.get("HANG_WHILE", "")):
            threading.Event().wait()
        return super().step()


def note(line: str) -> None:
    with open(os.environ["SLOW_LOG"], "a") as log:
        log.write(line + "\n")


def noting(place: Any, name: str, line: Callable[..., str]) -> Any:
    """Have each call of `place.name` noted, after it returned, as `line` tells it."""
    call: Callable[..., Any] = getattr(place, name)

    def noted(*arguments: Any) -> Any:
        result = call(*arguments)
        note(line(*arguments))
        return result

    return mock.patch.object(place, name, noted)


def main() -> int:
    info = {**mx.device_info(), "max_recommended_working_set_size": 8 << 30}
    wait_s = float(os.environ.get("SLOW_WAIT_S", CHUNK_WAIT_S))
    with (
        mock.patch.object(rank_setup, "Engine", SlowEngine),
        mock.patch.object(engine, "Decoder", HangingDecoder),
        mock.patch.object(mx, "device_info", lambda: info),
        mock.patch.object(shutdown, "CHUNK_WAIT_S", wait_s),
        mock.patch.object(shutdown, "SAY_AFTER_S", min(wait_s, SAY_AFTER_S)),
        noting(mx, "synchronize", lambda *stream: "synchronized" + " decoding" * len(stream)),
        noting(mx, "set_wired_limit", lambda limit: f"wired {limit}"),
        noting(KVManager, "queue_unwritten", lambda _: "handed over"),
    ):
        return real.main()


if __name__ == "__main__":
    code = main()
    note(f"exit {code}")
    sys.stderr.flush()
    os._exit(code)  # daemon threads that use MLX must not outlive the interpreter
