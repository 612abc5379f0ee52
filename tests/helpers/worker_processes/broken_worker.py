"""Runs a real worker whose cache has the one fault named in FAULT.

What tests of meaning must notice: each fault answers in time, in form, and from wrong KV.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final
from unittest import mock

import mlx.core as mx
import numpy as np

from hearth.worker.cache import block_hash, image_keys
from hearth.worker.cache.block_hash import Tokens
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.sessions.turn_store import ThinkingStore, TurnStore


def _blind() -> None:
    """The cache looks at how long a prompt is, not at what it says."""

    def pack(ids: Sequence[int], *_: Any) -> Tokens:
        return np.zeros(len(ids), dtype=np.int32)

    mock.patch.object(block_hash, "pack", pack).start()
    mock.patch.object(image_keys, "keys_of", pack).start()


def _scrambled() -> None:
    """What is copied back into a slot are not the values that were kept."""
    put_rows: Callable[..., None] = LayerMap.put_rows

    def scrambled(self: LayerMap, cache: list[Any], *rest: Any) -> None:
        put_rows(self, cache, *rest)
        _lose(cache)

    mock.patch.object(LayerMap, "put_rows", scrambled).start()


def _forgetful() -> None:
    """A slot that is gone on with has lost the values of what it held."""
    opened: Callable[..., Any] = KVManager.open

    def forgetful(self: KVManager, *rest: Any) -> Any:
        slot, plan = opened(self, *rest)
        if plan.position:
            _lose(slot.cache)
        return slot, plan

    mock.patch.object(KVManager, "open", forgetful).start()


def _estranged() -> None:
    """No turn is known again, and no thinking."""
    mock.patch.object(TurnStore, "find", lambda *_: ()).start()
    mock.patch.object(ThinkingStore, "get", lambda *_: "").start()


def _lose(cache: list[Any]) -> None:
    for leaf in cache:
        leaf.values = mx.zeros_like(leaf.values)


FAULTS: Final[dict[str, Callable[[], None]]] = {
    "blind": _blind,
    "scrambled": _scrambled,
    "forgetful": _forgetful,
    "estranged": _estranged,
}


def main() -> int:
    FAULTS[os.environ["FAULT"]]()
    from hearth.worker import main as real  # only now: its modules take what they need by name

    return real.main()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads that use MLX must not outlive the interpreter
