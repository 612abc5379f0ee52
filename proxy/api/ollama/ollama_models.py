"""Tells of models as Ollama's /api/tags, /api/show and /api/ps do."""

import time
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final

from hearth.proxy.api.ollama.ollama_events import timestamp
from hearth.proxy.pool.worker_link import WorkerLink
from hearth.proxy.request.model_names import LATEST, ModelNames
from hearth.shared.suspending_clock import awake_s

FOR_EVER_S: Final = 100 * 365 * 86_400.0  # a model that nothing unloads expires so late
_UNITS: Final = (("B", 10**9), ("M", 10**6), ("K", 10**3))
_BITS_RAW: Final = 15  # a parameter; fewer are quantised

ModelRow = Mapping[str, Any]  # an entry of /v1/models; one that was never loaded has no figures


def _capabilities(row: ModelRow) -> list[str]:
    """Return what a model can do; of text each has tools: where a template has none, in words."""
    shape = row.get("architecture", {})
    if "embeddings" in shape.get("output_modalities", ()):
        return ["embedding"]
    thinks = row.get("thinking", {}).get("default", "never") != "never"
    sees = "image" in shape.get("input_modalities", ())
    return ["completion", "tools", *["thinking"] * thinks, *["vision"] * sees]


def tagged(name: str) -> str:
    """Return `name` as Ollama lists it: clients look for the tag that they add to a name."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def tags_row(row: ModelRow) -> dict[str, Any]:
    """Return the entry of a model in the list of them."""
    return {
        "name": tagged(row["id"]),
        "model": tagged(row["id"]),
        "modified_at": timestamp(row["created"]),
        "size": row.get("meta", {}).get("size", 0),
        "digest": _digest(row["id"]),
        "details": _details(row),
        "capabilities": _capabilities(row),
    }


def shown(row: ModelRow) -> dict[str, Any]:
    """Return what is told of one model."""
    return {
        "license": "",
        "modelfile": f"# Hearth's settings name this model.\nFROM {row['id']}\n",
        "parameters": "",
        "template": "",
        "details": _details(row),
        "model_info": _model_info(row),
        "capabilities": _capabilities(row),
        "modified_at": timestamp(row["created"]),
    }


def running_row(names: ModelNames, links: list[WorkerLink], unload_s: float) -> dict[str, Any]:
    """Return the entry of a model that the workers of `links` have loaded."""
    beats = [link.heartbeat for link in links]
    facts = next(beat.model for beat in beats if beat is not None)
    assert facts is not None, [link.worker_id for link in links]
    taken = sum(beat.active_bytes for beat in beats if beat is not None)
    idle_s = awake_s() - max(link.used_at for link in links)
    left_s = max(0.0, unload_s - idle_s) if unload_s else FOR_EVER_S
    return {
        "name": tagged(facts.name),
        "model": tagged(facts.name),
        "size": taken,
        "digest": _digest(facts.name),
        "details": _details(names.row(facts.name, facts)),
        "expires_at": timestamp(time.time() + left_s),
        "size_vram": 0 if facts.backend == "cpu" else taken,
        "context_length": facts.context_tokens,
    }


def _digest(name: str) -> str:
    """Return what stands for the digest of a model's files, which nothing here is known by."""
    return sha256(name.encode()).hexdigest()


def _details(row: ModelRow) -> dict[str, Any]:
    meta = row.get("meta", {})
    family, count = meta.get("architecture", ""), meta.get("n_params", 0)
    sizes = (f"{count / size:.1f}{unit}" for unit, size in _UNITS if count >= size)
    return {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": next(sizes, str(count or "")),
        "quantization_level": _quantisation(count, meta.get("size", 0)),
    }


def _quantisation(parameters: int, nbytes: int) -> str:
    """Return how many bits a parameter has, in words that look like Ollama's."""
    if not parameters:
        return ""
    bits = 8 * nbytes / parameters
    if bits >= _BITS_RAW:
        return "F32" if bits > 2 * _BITS_RAW else "BF16"
    return f"Q{max(1, int(bits))}"


def _model_info(row: ModelRow) -> dict[str, Any]:
    """Return what is known, by the names that a GGUF file has."""
    meta = row.get("meta", {})
    family = meta.get("architecture", "")
    figures = {
        "general.architecture": family,
        "general.parameter_count": meta.get("n_params"),
        f"{family}.context_length": row.get("context_length"),
        f"{family}.embedding_length": meta.get("n_embd"),
    }
    known = {name: figure for name, figure in figures.items() if family and figure}
    return {"general.basename": row["id"]} | known
