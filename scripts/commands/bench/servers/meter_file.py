"""Reads what the meter in a server's processes has counted, and turns it into tokens."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hearth.commands.bench.server import Meter

METER_DIR: Final = Path(__file__).resolve().parent / "meter"  # for a server's PYTHONPATH
SLOT: Final = struct.Struct("<5Q")  # as meter/sitecustomize.py writes it
# Keys by which configs say that not every layer attends, in ways that are not read here.
MIXED: Final = (
    *("hybrid_override_pattern", "attn_layer_period", "attn_layer_indices", "ssm_cfg"),
    *("mamba_d_ssm", "mamba_num_heads", "block_types", "full_attn_idxs", "layers_block_type"),
)

HeadShape = tuple[int, int, int]  # query heads, KV heads, width


@dataclass(frozen=True, slots=True)
class AttentionCount:
    """What attention with heads of one shape has done."""

    rows: int = 0  # of calls with more than one query
    calls: int = 0

    def __add__(self, other: "AttentionCount") -> "AttentionCount":
        return AttentionCount(self.rows + other.rows, self.calls + other.calls)

    def __sub__(self, other: "AttentionCount") -> "AttentionCount":
        return AttentionCount(self.rows - other.rows, self.calls - other.calls)


Counts = Mapping[HeadShape, AttentionCount]
Layers = Mapping[HeadShape, float]  # what one token, or one forward, of the text model counts


def read_counts(directory: Path) -> dict[HeadShape, AttentionCount]:
    """Return the counts of all processes that have been metered in `directory`."""
    found: dict[HeadShape, AttentionCount] = {}
    for path in directory.iterdir():
        page = path.read_bytes()
        for place in range(0, len(page) - SLOT.size + 1, SLOT.size):
            heads, kv_heads, width, rows, calls = SLOT.unpack_from(page, place)
            if calls:
                shape = heads, kv_heads, width
                found[shape] = found.get(shape, AttentionCount()) + AttentionCount(rows, calls)
    return found


def layers_of_prompt(
    before: Counts, after: Counts, prompt_tokens: int, attention_layers: int | None
) -> dict[HeadShape, float]:
    """Return what one token counts, by what one prompt of text has counted on a fresh server.

    The shapes of the heads that took part are those of the text model. How many layers they are
    is said by the model's config, for a server may read a prompt twice; where that is not known,
    by the prompt, all of which or all but a token or two has been read once.
    """
    rows = {
        shape: made
        for shape, count in after.items()
        if (made := (count - before.get(shape, AttentionCount())).rows) > 0
    }
    total = sum(rows.values())
    if attention_layers is not None:
        return {shape: attention_layers * count / total for shape, count in rows.items()}
    counted = {shape: float(round(count / max(prompt_tokens, 1))) for shape, count in rows.items()}
    return {shape: layers for shape, layers in counted.items() if layers}


def meter_of(counts: Counts, layers: Layers) -> Meter | None:
    """Return tokens and forwards; None where no layer of the text model is known."""
    total = sum(layers.values())
    if not total:
        return None
    found = sum((counts.get(shape, AttentionCount()) for shape in layers), AttentionCount())
    return Meter(found.rows / total, found.calls / total)


def attention_layers(model: Path) -> int | None:
    """Return how many layers of the text model in `model` attend; None where that is not plain."""
    try:
        told: dict[str, Any] = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return None
    config = told.get("text_config") or told
    if kinds := config.get("layer_types"):
        return sum("attention" in kind and "linear" not in kind for kind in kinds) or None
    count = config.get("num_hidden_layers")
    if not isinstance(count, int) or any(key in config for key in MIXED):
        return None
    return count // int(config.get("full_attention_interval") or 1)
