"""Reports what one worker's cache holds, for `/v1/cache`."""

import bisect
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hearth.worker.cache.block_hash import key_root
from hearth.worker.cache.conversation_priority import LinePriority
from hearth.worker.cache.extent_store import Extent, Joint
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.kv.null_kv_manager import NullKVManager
from hearth.worker.setup.vision_setup import VisionParts

LINES_MAX = 200  # the most recently used
DEPTHS = (1_024, 4_096, 16_384, 65_536)  # tokens at which another range of depths begins


def cache_report(
    kv_manager: KVManager | NullKVManager, idle_tokens: int, key: str = ""
) -> dict[str, Any]:
    """Return budget, use, lines, live slots and pins. Inference thread.

    Sums are over all; the rest is of the API key with this digest, "" = everyone's.
    """
    report: dict[str, Any] = {"counts": dict(kv_manager.counts), "idle_tokens": idle_tokens}
    if isinstance(kv_manager, NullKVManager):
        return {"reuses": False, **report}
    store, budget = kv_manager.store, kv_manager.store.budget
    root = store.root_of(key_root(store.root.name, key)) if key else None
    slots = [
        {
            "slot": slot.number,
            "tokens": slot.position,
            "bytes": kv_manager.slot_bytes(slot),
            "busy": slot.is_busy,
            "line": slot.line.number if slot.line is not None else None,
        }
        for slot in kv_manager.slots
        if root in (None, slot.root)
    ]
    lines = _lines(list(store.extents if root is None else _under(root)))
    return {
        "reuses": True,
        "exact": kv_manager.rules.is_exact,
        "budget_bytes": budget.bytes_max,
        "bytes": budget.bytes_used,
        "budget_buffers": budget.buffers_max,
        "buffers": budget.buffers_used,
        "slots": slots,
        "slots_bytes": sum(map(kv_manager.slot_bytes, kv_manager.slots)),
        "slots_max": kv_manager.rules.slots_max,
        "extents": len(store),
        "snapshots": sum(joint.snapshot is not None for joint in store.joints),
        "evictions": kv_manager.evictions,
        "evicted": kv_manager.evictions_report(),
        "disk": kv_manager.disk_report(),
        "depths": _depths(lines),
        "entries": lines[:LINES_MAX],
        **kv_manager.pins_report(key),
        **report,
    }


def vision_report(vision: VisionParts | None) -> dict[str, Any] | None:
    """Return what was spent on images; None for a model that takes none. Inference thread."""
    if vision is None:
        return None
    encoder = vision.encoder
    return {
        "read": vision.reader.outcomes(),
        "encoder_calls": encoder.encoder_calls,
        "encoder_s": round(encoder.encoder_seconds, 3),
        "failures": encoder.failures,
        "bytes": encoder.nbytes,
        "splits_images": encoder.splits_images,
    }


def _under(root: Joint) -> Iterator[Extent]:
    """Yield the extents whose prompts begin at `root`."""
    waiting = [root]
    while waiting:
        for extent in waiting.pop().leaving:
            yield extent
            waiting.append(extent.end)


def _lines(extents: list[Extent]) -> list[dict[str, Any]]:
    """Return a row for each line, the most recently used first: what would be lost with it."""
    now = time.monotonic()
    rows: dict[LinePriority, dict[str, Any]] = {}
    for extent in extents:
        line = extent.line
        row = rows.setdefault(
            line,
            {
                "line": line.number,
                "tokens": 0,
                "own_tokens": 0,
                "bytes": 0,
                "hits": 0,
                "turns": line.turns,
                "age_s": round(now - line.opened_at, 1),
                "idle_s": 0.0 if line.is_running else round(now - line.used_at, 1),
                "session": None if line.sponsor is None else f"under line {line.sponsor.number}",
            },
        )
        row["tokens"] = max(row["tokens"], extent.end.position)
        row["own_tokens"] += len(extent.tokens)
        row["bytes"] += extent.nbytes
        snapshot = extent.end.snapshot
        row["bytes"] += snapshot.nbytes if snapshot is not None else 0
        row["hits"] += extent.end.resumed
    return sorted(rows.values(), key=lambda row: float(row["idle_s"]))


def _depths(lines: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many lines end in each range of depths, by its name: "1024-4095"."""
    found = Counter(bisect.bisect_right(DEPTHS, line["tokens"]) for line in lines)
    lasts = [*(f"{depth - 1}" for depth in DEPTHS), ""]
    return {f"{first}-{lasts[at]}": found[at] for at, first in enumerate((0, *DEPTHS))}
