"""Checks what the system says of this process's memory, and what Hearth expects KV to take."""

import statistics
from typing import Final

import mlx.core as mx

from hearth.worker.doctor.check_context import CheckContext, LeftOut, Steps
from hearth.worker.doctor.findings import Figure
from hearth.worker.engine.model_loader import backend
from hearth.worker.kv.return_freed_memory import release_memory

FOOTPRINT, ESTIMATE = "footprint", "KV estimate"
ROUNDS: Final = 3
TOLERANCE: Final = 0.08  # of what MLX has taken: pages, and what else the process does meanwhile
ESTIMATE_ROWS: Final = 1024
ESTIMATE_SLACK_BYTES: Final = 4 << 20  # that allocators round up
MB: Final = 1e6


def check_footprint(context: CheckContext) -> Steps:
    """Take a block that MLX counts, several times, and see by how much the process grew."""
    context.begin(FOOTPRINT)
    block = context.rules.footprint_block_bytes
    while block > context.room() and block > 32 << 20:
        block //= 2
    context.needs(block, "a block to measure by")
    before, counted = context.process_bytes(), mx.get_active_memory()
    figures: dict[str, Figure] = {
        "process_mb": before / MB,
        "mlx_mb": counted / MB,
        "beside_mlx_mb": (before - counted) / MB,
        "hearth_counts_mb": context.counted_bytes() / MB,
    }
    if not before:
        raise LeftOut("the system does not say what this process takes")
    if backend() == "cuda":
        raise LeftOut("a GPU's own memory is not in what the system says of a process")
    grown = []
    for _ in range(ROUNDS):
        release_memory()  # else the system's allocator may have the block still
        start, active = context.process_bytes(), mx.get_active_memory()
        array = mx.full((block // 4,), 1.0, dtype=mx.float32)
        mx.eval(array)
        taken = mx.get_active_memory() - active
        grown.append((context.process_bytes() - start) / max(1, taken))
        del array
        mx.clear_cache()
        yield
    share = statistics.median(grown)
    figures["grown_per_byte_taken"] = share
    reasons = []
    if abs(share - 1) > TOLERANCE:
        reasons.append(f"the process grew by {share:.2f} bytes for each that MLX took")
    if before < (1 - TOLERANCE) * counted:
        text = f"the process takes {before / MB:,.0f} MB and MLX counts {counted / MB:,.0f}"
        reasons.append(text)
    context.tell("fault" if reasons else "ok", figures, "; ".join(reasons))


def check_estimate(context: CheckContext) -> Steps:
    """Compare what a live cache is expected to take with what MLX counts for it."""
    context.begin(ESTIMATE)
    layers = context.layers()
    expected = layers.slot_bytes(ESTIMATE_ROWS, None)
    context.needs(expected, f"a live cache of {ESTIMATE_ROWS} tokens")
    mx.clear_cache()
    before = mx.get_active_memory()
    cache = context.engine.probe()
    layers.reserve(cache, ESTIMATE_ROWS)
    mx.eval([layer.state for layer in cache])
    taken = mx.get_active_memory() - before
    yield
    figures: dict[str, Figure] = {
        "rows": ESTIMATE_ROWS,
        "expected_mb": expected / MB,
        "taken_mb": taken / MB,
    }
    # A window is expected whole, and grows as it is filled: less than expected is no fault.
    is_short = taken > expected * (1 + TOLERANCE) + ESTIMATE_SLACK_BYTES
    reason = f"a live cache takes {taken / MB:.1f} MB, not {expected / MB:.1f}"
    context.tell("fault" if is_short else "ok", figures, reason if is_short else "")
