"""Measures what one rank holds and computes of each model family that mlx-lm divides over ranks."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.bench.ranks.family_configs import FAMILIES
from scripts.harness.ranks.ring_processes import RingError, run_ring

RANK: Final = "scripts.bench.ranks.family_rank"
WAIT_S_MAX: Final = 240.0  # 24 families take 12 s in one process of an idle machine
HANG_S_MAX: Final = 45.0  # of one family

Rows = dict[str, dict[str, Any]]


def measured(names: Sequence[str], size: int) -> list[Rows]:
    """Return the rows of each rank, by family; a family that fails or hangs is run alone."""
    with tempfile.TemporaryDirectory(prefix="hearth-families-") as scratch:
        try:
            return _run(names, size, Path(scratch), WAIT_S_MAX)
        except RingError:
            return _one_by_one(names, size, Path(scratch))


def _one_by_one(names: Sequence[str], size: int, scratch: Path) -> list[Rows]:
    rows: list[Rows] = [{} for _ in range(size)]
    for name in names:
        try:
            found = _run([name], size, scratch / name, HANG_S_MAX)
        except RingError as error:
            found = [{name: {"error": str(error).strip().splitlines()[-1]}} for _ in rows]
        for mine, more in zip(rows, found, strict=True):
            mine |= more
    return rows


def _run(names: Sequence[str], size: int, directory: Path, wait_s: float) -> list[Rows]:
    outs = [directory / f"{size}-{rank}.json" for rank in range(size)]
    run_ring([["-m", RANK, str(out), *names] for out in outs], directory, wait_s)
    return [json.loads(out.read_text()) for out in outs]


def family_row(name: str, lone: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what `ranks` held and computed of a family beside one rank's `lone`."""
    row: dict[str, Any] = {"family": name, "ranks": len(ranks)}
    if refused := next((rank["error"] for rank in ranks if "weight_bytes" not in rank), None):
        return row | {"error": refused}
    row["weights_whole"] = lone["weight_bytes"]
    row["weights_of_rank"] = max(rank["weight_bytes"] for rank in ranks)
    row["layers_whole"] = lone["layer_bytes"]
    row["layers_of_rank"] = max(rank["layer_bytes"] for rank in ranks)
    if failed := next((rank["error"] for rank in ranks if "error" in rank), None):
        return row | {"error": failed}
    same = [rank["logits"] == ranks[0]["logits"] for rank in ranks]
    tokens = zip(lone["tokens"], ranks[0]["tokens"], strict=True)
    gaps = zip(lone["logits"], ranks[0]["logits"], strict=True)
    return row | {
        "kv_whole": lone["kv_bytes"],
        "kv_of_rank": max(rank["kv_bytes"] for rank in ranks),
        "logits_differ_by": max(abs(one - other) for one, other in gaps),
        "is_warm_cold": all(rank["is_warm_cold"] for rank in ranks),
        "are_ranks_equal": all(same),
        "tokens_equal": sum(one == other for one, other in tokens),
        "tokens": len(lone["tokens"]),
    }


def family_rows(names: Sequence[str], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each family and number of ranks, one rank being what they are held to."""
    names = list(names) or list(FAMILIES)
    (lone,) = measured(names, 1)
    found = []
    for size in sizes:
        ranks = measured(names, size)
        found += [family_row(name, lone[name], [rank[name] for rank in ranks]) for name in names]
    return found
