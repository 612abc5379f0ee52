"""Reports a worker's cache for `/v1/cache`, and on request empties the cache or drops a pin."""

import bisect
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from types import MappingProxyType
from typing import Any, Final

from hearth.shared.wire_messages import Failed, ModelFacts, Status, Told
from hearth.worker.cache.block_hash import adapter_root, key_root
from hearth.worker.cache.conversation_priority import LinePriority
from hearth.worker.cache.extent_store import Extent, PrefixNode
from hearth.worker.kv.kv_manager import KVManager, NullKVManager
from hearth.worker.kv.kv_transfer import LiveSlot
from hearth.worker.kv.quantise_kv import PackedFormat, QuantFormat
from hearth.worker.serving_parts import ServingParts
from hearth.worker.sessions.session_manager import REJECTED, SessionManager
from hearth.worker.setup.load_setup import VisionParts

LINES_MAX = 200  # most conversations in a report; the most recently used come first
DEPTHS = (1_024, 4_096, 16_384, 65_536)  # bounds of the depth ranges, in tokens
CORRECTNESS: Final = ("vlm_retreat", "hybrid_trim_miss", REJECTED)


def answer_status(parts: ServingParts, message: Status, outbox: Sized) -> Told | Failed:
    """Execute the command of a Status, then return the report. Inference thread.

    `outbox` holds the frames that wait in the wire thread.
    """
    kv_manager, scheduler, api_key = parts.kv_manager, parts.scheduler, message.key
    if message.what in ("doctor", "check_again"):
        return Told(message.request_id, parts.doctor.answer(message.what))
    if message.what == "unpin" and not kv_manager.unpin(message.about, api_key):
        text = f"No pin {message.about!r:.80} is in this worker; /v1/cache lists them."
        return Failed(message.request_id, 404, "not_found", text)
    if message.what == "clear_cache":
        scheduler.forget()
        parts.sessions.forget_lines()
        parts.suspects.clear(api_key)
        parts.grammars.end_idle(0.0)
        if parts.vision is not None:
            parts.vision.forget()
    report = cache_report(
        kv_manager,
        scheduler.idle_tokens,
        api_key,
        parts.loaded.facts,
        scheduler.decoder.batch_bytes,
        parts.loaded.adapters.identities,
    )
    report |= {
        "adapters": parts.loaded.adapters.report(),
        "quantisation": quantisation_report(kv_manager),
        "dtype": parts.loaded.dtype.row(),
        "ranks": parts.rank.report(parts.loop.active_bytes),
        "trunks": scheduler.decoder.trunks_report(),
        "sessions": parts.sessions.counters(),
        "vision": vision_report(parts.vision),
        "grammars": parts.grammars.report(),
        "suspects": parts.suspects.report(api_key),
        **scheduler.report(api_key),
        **parts.memory.report(),
        "wire_waiting_frames": len(outbox),
    }
    return Told(message.request_id, report)


def cache_report(
    kv_manager: KVManager | NullKVManager,
    idle_tokens: int,
    api_key: str = "",
    facts: ModelFacts | None = None,
    batch_bytes: int = 0,
    adapters: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return budget, use, conversations, live slots and pins. Inference thread.

    Sums cover all API keys; the rest covers the key with the digest `api_key`, "" = all keys.
    `batch_bytes` are the bytes of live caches in a batch; `adapters` maps names to identities.
    """
    report: dict[str, Any] = {"counts": dict(kv_manager.counts), "idle_tokens": idle_tokens}
    if isinstance(kv_manager, NullKVManager):
        return {"reuses": False, **report}
    store, budget = kv_manager.store, kv_manager.store.budget
    root = key_root(store.root.name, api_key)
    nodes = map(store.node, [root, *(adapter_root(root, name) for name in adapters.values())])
    roots = [node for node in nodes if node is not None] if api_key else None
    lines = _lines(kv_manager, store.extents if roots is None else _under(roots), facts)
    depths = Counter(bisect.bisect_right(DEPTHS, line["tokens"]) for line in lines)
    depth_ends = [*(f"{depth - 1}" for depth in DEPTHS), ""]
    evictor = kv_manager.transfer.evictor
    return {
        "reuses": True,
        "exact": kv_manager.rules.is_exact,
        "budget_bytes": budget.bytes_max,
        "bytes": budget.bytes_used,
        "budget_buffers": budget.buffers_max,
        "buffers": budget.buffers_used,
        "slots": [_slot(kv_manager, s) for s in kv_manager.slots if _is_among(s.root, roots)],
        "slots_bytes": sum(map(kv_manager.slot_bytes, kv_manager.slots)) + batch_bytes,
        "idle_slots_bytes_max": kv_manager.idle_bytes_max,
        "batch_bytes": batch_bytes,
        "slots_max": kv_manager.rules.slots_max,
        "extents": len(store),
        "snapshots": sum(node.snapshot is not None for node in store.nodes),
        "evictions": kv_manager.evictions,
        "evicted": {
            "count": dict(evictor.evicted),
            "bytes": dict(evictor.evicted_bytes),
            # Newest first; only entries under `roots`.
            "last": [entry.as_row() for entry in evictor.last if _is_among(entry.root, roots)],
        },
        "layers": layer_counts(kv_manager),
        "disk": kv_manager.disk_report(),
        "depths": {f"{low}-{depth_ends[n]}": depths[n] for n, low in enumerate((0, *DEPTHS))},
        "entries": lines[:LINES_MAX],
        **kv_manager.pins.report(api_key),
        **report,
    }


# The parts of kept KV, by the evictor's names: what goes when such a part is evicted.
EVICTED: Final = {
    "rows": ("copy", "extent", "expired"),
    "window": ("window", "extent", "expired"),
    "state": ("snapshot", "extent", "expired"),
}


def layer_counts(kv_manager: KVManager) -> dict[str, dict[str, int]]:
    """Return how often parts of each class of layer cache were kept, restored and evicted."""
    evicted, moved = kv_manager.transfer.evictor.evicted, kv_manager.layers.moved
    return {
        name: {
            **{event: sum(moved[event, part] for part in parts) for event in ("kept", "restored")},
            "evicted": sum(evicted[kind] for kind in {k for part in parts for k in EVICTED[part]}),
        }
        for name, parts in kv_manager.layers.parts.items()
    }


def _slot(kv_manager: KVManager, slot: LiveSlot) -> dict[str, Any]:
    return {
        "slot": slot.number,
        "tokens": slot.position,
        "bytes": kv_manager.slot_bytes(slot),
        "bits": slot.format.bits if slot.format is not None else None,
        "busy": slot.is_busy,
        "batched": not slot.cache,  # the slot's KV is in a batch
        "line": slot.line.number,
        "adapter": slot.adapter or None,
    }


def _is_among(root: PrefixNode, roots: Sequence[PrefixNode] | None) -> bool:
    return roots is None or root in roots


def quantisation_report(kv_manager: KVManager | NullKVManager) -> dict[str, Any] | None:
    """Return the bits of KV in live slots and of kept KV; None for a worker that keeps no KV.

    `live` and `stored` are None if the KV stays as computed. `ignored` maps each setting without
    effect to the reason.
    """
    if isinstance(kv_manager, NullKVManager):
        return None
    rules = kv_manager.rules
    return {
        "live": _format(rules.running_format, rules.running_from),
        "stored": _format(rules.store_format, rules.store_from),
        "ignored": {"CACHE_STORE_BITS": rules.store_ignored} if rules.store_ignored else {},
    }


def _format(form: PackedFormat | None, from_tokens: int) -> dict[str, Any] | None:
    if form is None:
        return None
    group_size = form.group_size if isinstance(form, QuantFormat) else None
    packed = {"bits": form.bits, "group_size": group_size, "scheme": form.scheme}
    return packed | {"from_tokens": from_tokens}


def vision_report(vision: VisionParts | None) -> dict[str, Any] | None:
    """Return the counts and times of images; None for a text-only model. Inference thread."""
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


def correctness_counts(
    kv_manager: KVManager | NullKVManager, sessions: SessionManager
) -> dict[str, int]:
    """Return the counters that a correct cache keeps at 0, or low for a hybrid model."""
    counts = {**kv_manager.counts, **sessions.counters()}
    return {name: counts.get(name, 0) for name in CORRECTNESS}


def _under(roots: Sequence[PrefixNode]) -> Iterator[Extent]:
    """Yield the extents below the roots."""
    waiting = list(roots)
    while waiting:
        for extent in waiting.pop().leaving:
            yield extent
            waiting.append(extent.end)


def _lines(
    kv_manager: KVManager, extents: Iterable[Extent], facts: ModelFacts | None
) -> list[dict[str, Any]]:
    """Return a dict for each conversation, the most recently used first."""
    extents_of: dict[LinePriority, list[Extent]] = {}
    for extent in extents:
        extents_of.setdefault(extent.line, []).append(extent)
    slots = kv_manager.slots
    costs = {form: kv_manager.row_bytes(form) for form in {slot.format for slot in slots}}
    row_bytes = {slot.number: costs[slot.format] for slot in slots}
    images: dict[PrefixNode, int] = {}
    rows = []
    now = time.monotonic()
    for line, own in sorted(
        extents_of.items(), key=lambda item: (not item[0].is_running, -item[0].used_at)
    ):
        last = max(own, key=lambda extent: extent.end.position).end
        kept = sum(map(_kept_bytes, own))
        live = sum(row_bytes[min(e.holders)] * len(e.tokens) for e in own if e.holders)
        rows.append(
            {
                "line": line.number,
                "turns": line.turns,
                "age_s": round(now - line.opened_at, 1),
                "idle_s": 0.0 if line.is_running else round(now - line.used_at, 1),
                "session": None if line.sponsor is None else f"under line {line.sponsor.number}",
                "model": facts.name if facts is not None else None,
                "tokens": last.position,
                "own_tokens": sum(len(extent.tokens) for extent in own),
                "context_share": last.position / facts.context_tokens if facts else None,
                "bytes": kept + live,
                "slot_bytes": live,  # part of `bytes` in live slots
                "images": _images_to(last, images),
                "hits": sum(extent.end.resumed for extent in own),
            }
        )
    return rows


def _kept_bytes(extent: Extent) -> int:
    """Return the budget bytes of an extent and of the snapshot at its end."""
    snapshot = extent.end.snapshot
    return extent.nbytes + (snapshot.nbytes if snapshot is not None else 0)


def _images_to(node: PrefixNode, known: dict[PrefixNode, int]) -> int:
    """Return the number of images in a prompt up to `node`; `known` caches counts by node."""
    path = []
    while node not in known and node.arrival is not None:
        path.append(node.arrival)
        node = node.arrival.start
    count = known.get(node, 0)
    for extent in reversed(path):
        count = known[extent.end] = count + extent.images
    return count
