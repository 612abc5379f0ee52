"""Describes this machine, its BLAS and a loaded model for findings and reports."""

import ctypes
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from xxhash import xxh3_128

from hearth.shared.machine import physical_bytes
from hearth.shared.models.model_path import BUILTIN_MODELS
from hearth.shared.version import VERSION
from hearth.worker.cache.block_hash import root_hash
from hearth.worker.doctor.findings import Subject
from hearth.worker.engine.model_loader import LoadedModel, backend
from hearth.worker.engine.weights_identity import WeightsIdentity


def subject_of(identity: WeightsIdentity) -> Subject:
    """Return the subject of findings about a checkpoint on this machine.

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
    """Return the device's name, e.g. "Apple M2 Max"."""
    name: Any = mx.device_info().get("device_name")
    return str(name or platform.processor() or platform.machine())


def machine_facts() -> dict[str, Any]:
    """Return a report's facts about this machine, without the names of machine and user."""
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


def model_facts(loaded: LoadedModel, dtype: str) -> dict[str, Any]:
    """Return a report's facts about the model, with a hub's id but no directory's name."""
    facts = loaded.facts
    is_local = Path(facts.path).expanduser().exists() or facts.path.count("/") != 1
    name = "a local checkpoint" if is_local else facts.path
    builtin = [model.source for model in BUILTIN_MODELS if model.directory == loaded.directory]
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


class _SymbolInfo(ctypes.Structure):
    """The fields of Dl_info: where a function is."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def loaded_blas() -> str:
    """Return an identity of this process's BLAS: the hash of its file, and its configuration.

    A BLAS computes MLX's fp32 products on the CPU, and another BLAS gives other last bits. "" means
    that MLX calls no BLAS.

    OpenBLAS chooses its kernels by the CPU, or by OPENBLAS_CORETYPE. A small libblas.so.3
    may load OpenBLAS, so the configuration, with version and core, is part of the identity. The
    number of threads changes no bit (measured with 1 and 2 threads, eight shapes). Accelerate has
    no file; the version of macOS stands for it.
    """
    if sys.platform == "darwin":
        return f"Accelerate of macOS {platform.mac_ver()[0]}"
    process = ctypes.CDLL(None)
    # The order of the linker: preloaded libraries, then the libraries of MLX.
    library = process if hasattr(process, "cblas_sgemm") else ctypes.CDLL(mx.__file__)
    if not hasattr(library, "cblas_sgemm"):
        return ""
    symbol = _SymbolInfo()
    process.dladdr(library.cblas_sgemm, ctypes.byref(symbol))
    name = xxh3_128(Path(os.fsdecode(symbol.file)).read_bytes()).hexdigest()
    if not hasattr(library, "openblas_get_config"):
        return name
    library.openblas_get_config.restype = ctypes.c_char_p
    return f"{name} {library.openblas_get_config().decode()}"
