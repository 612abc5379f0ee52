"""Makes what says in which bits a request may have its KV."""

import functools
from dataclasses import replace

from hearth.worker.engine.engine import Engine
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.kv.null_kv_manager import NullKVManager
from hearth.worker.kv.quantise_kv import QuantFormat
from hearth.worker.schedule.requested_bits import RequestedBits


def make_requested_bits(
    engine: Engine, kv_manager: KVManager | NullKVManager, ranks: int = 1
) -> RequestedBits:
    """Return what says in which bits a request may have its KV; over several ranks, none."""
    if isinstance(kv_manager, NullKVManager):
        return RequestedBits(never="its caches are of a kind that is not known here")
    if ranks > 1:
        return RequestedBits(kv_manager.rules, never=f"RANKS is {ranks} (docs/ranks.md)")
    rules = kv_manager.rules
    never = "only exact KV is reused, and none is packed, before CACHE_EXACT=false is set"
    why_not = functools.partial(_why_not_held, engine, kv_manager)
    return RequestedBits(rules, why_not, never if rules.is_exact else "")


def _why_not_held(engine: Engine, kv_manager: KVManager, form: QuantFormat | None) -> str | None:
    """Return why the model does not run on rows in `form`, None = raw; None where it does.

    Tries it, in 11 forwards of at most 64 tokens where answers are batched; raw rows it always
    takes. Padding counts from then on as of the widest rows that there are.
    """
    if kv_manager.rules.running_format is not None:  # else none are wider than the server's
        widest = max(engine.decoder.cost.row_bytes, kv_manager.row_bytes(form))
        engine.decoder.cost = replace(engine.decoder.cost, row_bytes=widest)
    if form is None:
        return None
    reason = engine.why_not_quantised(form.bits, form.group_size)
    if reason is not None:
        return f"mlx-lm cannot quantise it: {reason}"
    if engine.decoder.is_mergeable and not engine.batches_packed(form.bits, form.group_size):
        return "answers share forwards here, and packed rows cannot"
    return None
