"""Reports how one worker's KV is quantised, as its settings say and as it is done."""

from dataclasses import asdict, dataclass
from typing import Any

from hearth.worker.kv.kv_transfer import KeepRules


@dataclass(frozen=True, slots=True)
class QuantisationReport:
    """What is in use. Bits of 0 are off, and what belongs to them then says nothing."""

    store_bits: float  # of KV that is stored from now on, in memory and on disk
    store_scheme: str  # uniform, turboquant; "" where it is off
    store_group_size: int  # 0 where the scheme has none
    store_min_tokens: int  # prefixes of fewer are stored as they are
    store_ignored: str  # why CACHE_STORE_BITS is not in use though set; "" where it is
    serves_packed: bool  # KV that was stored packed is reused: not in exact mode
    live_bits: int  # KV_BITS
    live_group_size: int
    live_from_tokens: int


def quantisation_report(rules: KeepRules) -> dict[str, Any]:
    """Return the fields of `QuantisationReport`. Any thread: the rules never change."""
    stored, live = rules.store_format, rules.running_format
    report = QuantisationReport(
        store_bits=stored.bits if stored is not None else 0,
        store_scheme=stored.scheme if stored is not None else "",
        store_group_size=getattr(stored, "group_size", 0),
        store_min_tokens=rules.store_from,
        store_ignored=rules.store_ignored,
        serves_packed=not rules.is_exact,
        live_bits=live.bits if live is not None else 0,
        live_group_size=live.group_size if live is not None else 0,
        live_from_tokens=rules.running_from,
    )
    return asdict(report)
