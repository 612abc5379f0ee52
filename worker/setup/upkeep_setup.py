"""Makes what a worker does with its cache beside requests: sweeping, expiry, counting evictions."""

import threading
from collections.abc import Callable

from hearth.worker.kv.idle_expiry import IdleExpiry
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.kv.null_kv_manager import NullKVManager
from hearth.worker.schedule.memory_guard import MemoryGuard, Watermark


def sweep_of(kv_manager: KVManager | NullKVManager, memory: MemoryGuard) -> Callable[[], bool]:
    """Return a function that gives up old slots, and warns where a budget is nearly used up."""
    marks = [Watermark("Memory", "MEMORY_LIMIT_MB", memory.used, memory.limit)]
    if isinstance(kv_manager, KVManager):
        budget = kv_manager.store.budget
        marks.append(
            Watermark(
                "Kept KV",
                "CACHE_RAM_BUDGET_MB",
                lambda: budget.bytes_used,
                lambda: budget.bytes_max,
            )
        )

    def sweep() -> bool:
        for mark in marks:
            mark.check()
        return kv_manager.sweep()

    return sweep


def evictions_of(kv_manager: KVManager | NullKVManager) -> Callable[[], int] | None:
    """Return a function that says how often kept KV made way; None where none is kept."""
    if isinstance(kv_manager, NullKVManager):
        return None
    return lambda: kv_manager.evictions


def expire_of(kv_manager: KVManager | NullKVManager) -> Callable[[], bool]:
    """Return a function that does a step of giving back what is unused, and says if more is due."""
    return IdleExpiry(kv_manager).step if isinstance(kv_manager, KVManager) else lambda: False


def look_of(
    kv_manager: KVManager | NullKVManager | None, workers: int
) -> Callable[[], threading.Event | None]:
    """Return a function that has what others put on disk found; its event says when it was.

    `workers` are those of this server, which share the directory.
    """
    if not isinstance(kv_manager, KVManager) or kv_manager.disk is None:
        return lambda: None
    kv_manager.disk.thread.file_store.is_shared |= workers > 1
    return kv_manager.disk.thread.look
