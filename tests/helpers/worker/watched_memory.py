"""Makes socketless workers with a limit of memory, of which all KV that they hold is counted."""

from collections.abc import Callable
from typing import Any

import numpy as np

from hearth.worker.engine.decode.batch_split import ReadCost
from hearth.worker.schedule.memory_guard import MemoryGuard
from scripts.harness.socketless_worker import Answer, Machine, machine


def held_bytes(made: Machine) -> int:
    """Return the bytes of all KV that a worker holds: kept, in slots and in batches."""
    keeper = made.keeper
    slots = sum(map(keeper.slot_bytes, keeper.slots))
    return int(keeper.store.budget.bytes_used + slots + made.scheduler.decoder.batch_bytes)


class Watched:
    """A machine that may hold `limit` bytes of KV; `peak` is the most that it held in a step."""

    def __init__(
        self,
        limit: int = 1 << 60,
        forward: Callable[[int], int] = lambda _depth: 0,
        name: str = "qwen3",
        **more: Any,
    ) -> None:
        self.limit, self.peak = limit, 0
        guard = MemoryGuard(lambda: self.limit, self.held, forward)
        self.machine: Machine = machine(name, tiny=True, memory=guard, **more)
        decoder: Any = self.machine.engine.decoder
        decoder.cost = ReadCost(1e9, row_bytes=slot_bytes(2_560) // 2_560)  # padding weighs little
        step = decoder.step

        def watched() -> Any:
            sampled = step()
            self.peak = max(self.peak, self.held())
            return sampled

        decoder.step = watched

    def held(self) -> int:
        return held_bytes(self.machine) if hasattr(self, "machine") else 0

    def written(self, answers: list[Answer]) -> list[int]:
        """Compute until all is answered; return how many tokens each answer has."""
        self.machine.run()
        return [each.usage.completion_tokens if each.usage else 0 for each in answers]


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 200, count).tolist()


def slot_bytes(tokens: int, name: str = "qwen3") -> int:
    return machine(name, tiny=True).layers.slot_bytes(tokens, None)
