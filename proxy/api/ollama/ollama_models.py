"""Tells of models as Ollama's /api/tags, /api/show and /api/ps do."""

import time
from hashlib import sha256
from typing import Any, Final

from hearth.proxy.api.ollama.ollama_events import timestamp
from hearth.proxy.pool.worker_link import WorkerLink
from hearth.proxy.request.model_names import LATEST
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import ModelFacts

FOR_EVER_S: Final = 100 * 365 * 86_400.0  # a model that nothing unloads expires so late
_BITS_RAW: Final = 15  # a parameter; fewer are quantised


def tagged(name: str) -> str:
    """Return `name` as Ollama lists it: clients look for the tag that they add to a name."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def tags_row(name: str, facts: ModelFacts | None, since_s: float) -> dict[str, Any]:
    """Return the entry of one name in the list of models."""
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": timestamp(since_s),
        "size": facts.weight_bytes if facts is not None else 0,
        "digest": _digest(name),
        "details": _details(facts),
        "capabilities": _capabilities(facts),
    }


def shown(name: str, facts: ModelFacts | None, since_s: float) -> dict[str, Any]:
    """Return what is told of one model; its sizes are known once a worker has loaded it."""
    return {
        "license": "",
        "modelfile": f"# Hearth serves this model; MODEL_PATH and MODELS name it.\nFROM {name}\n",
        "parameters": "",
        "template": "",
        "details": _details(facts),
        "model_info": _model_info(name, facts),
        "capabilities": _capabilities(facts),
        "modified_at": timestamp(since_s),
    }


def running_row(links: list[WorkerLink], unload_s: float) -> dict[str, Any]:
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
        "details": _details(facts),
        "expires_at": timestamp(time.time() + left_s),
        "size_vram": 0 if facts.backend == "cpu" else taken,
        "context_length": facts.context_tokens,
    }


def _digest(name: str) -> str:
    """Return what stands for the digest of a model's files, which nothing here is known by."""
    return sha256(name.encode()).hexdigest()


def _details(facts: ModelFacts | None) -> dict[str, Any]:
    family = facts.architecture if facts is not None else ""
    return {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _count(facts.parameter_count) if facts is not None else "",
        "quantization_level": _quantisation(facts) if facts is not None else "",
    }


def _count(parameters: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.1f}{unit}"
    return str(parameters)


def _quantisation(facts: ModelFacts) -> str:
    """Return how many bits a parameter has, in words that look like Ollama's."""
    bits = 8 * facts.weight_bytes / max(1, facts.parameter_count)
    if bits >= _BITS_RAW:
        return "F32" if bits > 2 * _BITS_RAW else "BF16"
    return f"Q{max(1, int(bits))}"


def _capabilities(facts: ModelFacts | None) -> list[str]:
    """Return what a model can do. Every one calls tools: where its template has none, in text."""
    found = ["completion", "tools"]
    if facts is not None and facts.thinks:
        found.append("thinking")
    if facts is not None and facts.takes_images:
        found.append("vision")
    return found


def _model_info(name: str, facts: ModelFacts | None) -> dict[str, Any]:
    if facts is None:
        return {"general.basename": name}
    architecture = facts.architecture
    return {
        "general.architecture": architecture,
        "general.basename": name,
        "general.parameter_count": facts.parameter_count,
        f"{architecture}.context_length": facts.context_tokens,
        f"{architecture}.vocab_size": facts.vocab_size,
    }
