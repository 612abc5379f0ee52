"""Makes socketless workers with a limit of memory, of which all KV that they hold is counted."""

from typing import Any

import numpy as np

from hearth.shared.wire_messages import Up
from hearth.worker.schedule.memory_guard import MemoryGuard
from scripts.harness.socketless_worker import Machine, machine


class Watched:
    """A machine that may hold `limit` bytes of KV, slots and kept ones together."""

    def __init__(self, limit: int, **more: Any) -> None:
        self.machine: Machine = machine(
            "qwen3", tiny=True, memory=MemoryGuard(lambda: limit, self.held), **more
        )

    def held(self) -> int:
        keeper = self.machine.keeper
        return keeper.store.budget.bytes_used + sum(map(keeper.slot_bytes, keeper.slots))

    def step(self) -> list[Up]:
        events = self.machine.step()
        return events


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 200, count).tolist()


def slot_bytes(tokens: int) -> int:
    return machine("qwen3", tiny=True).layers.slot_bytes(tokens, None)
