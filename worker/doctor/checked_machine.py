"""Names this machine and a loaded model, as findings do."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from hearth.shared.machine import physical_bytes
from hearth.shared.models.model_path import BUILTIN_MODELS
from hearth.shared.version import VERSION
from hearth.worker.cache.block_hash import root_hash
from hearth.worker.doctor.findings import Subject
from hearth.worker.engine.compute_dtype import dtype_of
from hearth.worker.engine.model_loader import LoadedModel, backend
from hearth.worker.engine.weights_identity import WeightsIdentity


def subject_of(identity: WeightsIdentity) -> Subject:
    """Return what findings about a checkpoint are filed under on this machine.

    The weights need not be loaded.
    """
    return Subject(
        chip=chip(),
        backend=backend(),
        model=root_hash(identity.parts()).hex(),
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
    )


def chip() -> str:
    """Return how the device names itself, e.g. "Apple M2 Max"."""
    name: Any = mx.device_info().get("device_name")
    return str(name or platform.processor() or platform.machine())


def weights_dtype(loaded: LoadedModel) -> str:
    """Return the type that most of the weights which are no packed integers have."""
    return dtype_of(loaded.model) or "unknown"


def machine_row() -> dict[str, Any]:
    """Return what a report tells of this machine: no name of it, nor of who uses it."""
    mac = platform.mac_ver()[0]
    system = f"macOS {mac}" if mac else f"{platform.system()} {platform.release()}"
    return {
        "hearth": VERSION,
        "chip": chip(),
        "memory_gb": round(physical_bytes() / 2**30, 1),
        "cores": os.cpu_count(),
        "system": f"{system} {platform.machine()}",
        "python": platform.python_version(),
        "backend": backend(),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
    }


def model_row(loaded: LoadedModel, dtype: str) -> dict[str, Any]:
    """Return what a report tells of the model: a hub's id, but no directory's name."""
    facts = loaded.facts
    is_local = Path(facts.path).expanduser().exists() or facts.path.count("/") != 1
    name = "a local checkpoint" if is_local else facts.path
    builtin = [each.source for each in BUILTIN_MODELS if each.directory == loaded.directory]
    quantisation = loaded.config.get("quantization") or {}
    return {
        "model": builtin[0] if builtin else name,
        "architecture": facts.architecture,
        "parameters": facts.parameter_count,
        "weights_mb": round(facts.weight_bytes / 1e6),
        "dtype": dtype,
        "bits": quantisation.get("bits"),
        "cache": facts.cache_layout,
        "context_tokens": facts.context_tokens,
    }
