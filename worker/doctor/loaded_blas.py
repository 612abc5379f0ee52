"""Names the BLAS that computes MLX's fp32 products on the CPU: another gives other last bits."""

import ctypes
import os
import platform
import sys
from pathlib import Path

import mlx.core as mx
from xxhash import xxh3_128


class _Place(ctypes.Structure):
    """Says where a function is: the fields of Dl_info."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def loaded_blas() -> str:
    """Return what tells the BLAS of this process from others: its bytes, and what it chose.

    An OpenBLAS chooses its kernels by the CPU, or by OPENBLAS_CORETYPE, and a small libblas.so.3
    may stand before it: it tells its version and its core. How many threads it has changes no bit
    (1 and 2, eight shapes). Accelerate has no file of its own, and comes with macOS. "" = MLX
    calls none.
    """
    if sys.platform == "darwin":
        return f"Accelerate of macOS {platform.mac_ver()[0]}"
    process = ctypes.CDLL(None)
    # As the linker looks for it: what was preloaded, then what MLX was linked with.
    library = process if hasattr(process, "cblas_sgemm") else ctypes.CDLL(mx.__file__)
    if not hasattr(library, "cblas_sgemm"):
        return ""
    place = _Place()
    process.dladdr(library.cblas_sgemm, ctypes.byref(place))
    name = xxh3_128(Path(os.fsdecode(place.file)).read_bytes()).hexdigest()
    if not hasattr(library, "openblas_get_config"):
        return name
    library.openblas_get_config.restype = ctypes.c_char_p
    return f"{name} {library.openblas_get_config().decode()}"
