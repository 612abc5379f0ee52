"""Tells of models as Ollama's /api/tags, /api/show and /api/ps do."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from hearth.proxy.api.ollama.ollama_events import timestamp
from hearth.proxy.pool.worker_link import WorkerLink
from hearth.proxy.request.model_names import LATEST
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import ModelFacts

FOR_EVER_S: Final = 100 * 365 * 86_400.0  # a model that nothing unloads expires so late
_UNITS: Final = (("B", 10**9), ("M", 10**6), ("K", 10**3))
_BITS_RAW: Final = 15  # a parameter; fewer are quantised
_TEXT: Final = ("completion", "tools")  # of every model: where a template has no tools, in text


@dataclass(frozen=True, slots=True)
class TagModel:
    """A model as Ollama's clients see it. Figures are 0 and texts empty until it was loaded."""

    name: str
    capabilities: tuple[str, ...]
    architecture: str = ""
    parameters: int = 0
    size_bytes: int = 0
    context_tokens: int = 0
    dimensions: int = 0  # of an embedding

    @classmethod
    def of_text(cls, name: str, facts: ModelFacts | None) -> "TagModel":
        if facts is None:
            return cls(name, _TEXT)
        thinks = ("thinking",) if facts.thinking.default != "never" else ()
        sees = ("vision",) if facts.takes_images else ()
        return cls(
            name,
            (*_TEXT, *thinks, *sees),
            facts.architecture,
            facts.parameter_count,
            facts.weight_bytes,
            facts.context_tokens,
        )

    @classmethod
    def of_embeddings(cls, name: str, told: Mapping[str, Any]) -> "TagModel":
        """Return the model of which the list of models has `told`."""
        meta = told.get("meta", {})
        return cls(
            name,
            ("embedding",),
            meta.get("architecture", ""),
            size_bytes=meta.get("size", 0),
            context_tokens=told.get("context_length", 0),
            dimensions=meta.get("n_embd", 0),
        )


def tagged(name: str) -> str:
    """Return `name` as Ollama lists it: clients look for the tag that they add to a name."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def tags_row(model: TagModel, since_s: float) -> dict[str, Any]:
    """Return the entry of a model in the list of them."""
    return {
        "name": tagged(model.name),
        "model": tagged(model.name),
        "modified_at": timestamp(since_s),
        "size": model.size_bytes,
        "digest": _digest(model.name),
        "details": _details(model),
        "capabilities": model.capabilities,
    }


def shown(model: TagModel, since_s: float) -> dict[str, Any]:
    """Return what is told of one model."""
    return {
        "license": "",
        "modelfile": f"# Hearth's settings name this model.\nFROM {model.name}\n",
        "parameters": "",
        "template": "",
        "details": _details(model),
        "model_info": _model_info(model),
        "capabilities": model.capabilities,
        "modified_at": timestamp(since_s),
    }


def running_row(links: list[WorkerLink], unload_s: float) -> dict[str, Any]:
    """Return the entry of a model that the workers of `links` have loaded."""
    beats = [link.heartbeat for link in links]
    facts = next(beat.model for beat in beats if beat is not None)
    assert facts is not None, [link.worker_id for link in links]
    taken = sum(beat.active_bytes for beat in beats if beat is not None)
    idle_s = awake_s() - max(link.uses.at for link in links)
    left_s = max(0.0, unload_s - idle_s) if unload_s else FOR_EVER_S
    return {
        "name": tagged(facts.name),
        "model": tagged(facts.name),
        "size": taken,
        "digest": _digest(facts.name),
        "details": _details(TagModel.of_text(facts.name, facts)),
        "expires_at": timestamp(time.time() + left_s),
        "size_vram": 0 if facts.backend == "cpu" else taken,
        "context_length": facts.context_tokens,
    }


def _digest(name: str) -> str:
    """Return what stands for the digest of a model's files, which nothing here is known by."""
    return sha256(name.encode()).hexdigest()


def _details(model: TagModel) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "mlx",
        "family": model.architecture,
        "families": [model.architecture] if model.architecture else [],
        "parameter_size": next(
            (
                f"{model.parameters / size:.1f}{unit}"
                for unit, size in _UNITS
                if model.parameters >= size
            ),
            str(model.parameters or ""),
        ),
        "quantization_level": _quantisation(model),
    }


def _quantisation(model: TagModel) -> str:
    """Return how many bits a parameter has, in words that look like Ollama's."""
    if not model.parameters:
        return ""
    bits = 8 * model.size_bytes / model.parameters
    if bits >= _BITS_RAW:
        return "F32" if bits > 2 * _BITS_RAW else "BF16"
    return f"Q{max(1, int(bits))}"


def _model_info(model: TagModel) -> dict[str, Any]:
    """Return what is known, by the names that a GGUF file has."""
    found: dict[str, Any] = {"general.basename": model.name}
    if not model.architecture:
        return found
    found["general.architecture"] = model.architecture
    figures = {
        "general.parameter_count": model.parameters,
        f"{model.architecture}.context_length": model.context_tokens,
        f"{model.architecture}.embedding_length": model.dimensions,
    }
    return found | {name: figure for name, figure in figures.items() if figure}
