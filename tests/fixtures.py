"""Tiny checkpoints of real architectures, made once per machine by scripts/make_fixture.py."""

import fcntl
import hashlib
import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

from shared.blas import openblas_environment

PROJECT_DIR = Path(__file__).resolve().parent.parent
SCRIPT = PROJECT_DIR / "scripts" / "make_fixture.py"
MAKE_WAIT_S_MAX = 120  # for what takes 4 s on an idle machine

TEXT_NAMES = (
    "qwen3",
    "llama",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_next",
    "gpt_oss",
    "gemma3_text",
    "glm4_moe_lite",
    "deepseek_v32",
    "falcon_h1",
)
VISION_NAMES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "qwen3_5_vl")
TINY_NAMES = ("qwen3", "qwen3_5", "gpt_oss")

_DTYPE_LABELS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def fixture_dir(
    name: str, dtype: str = "float32", quant: int | None = None, tiny: bool = False
) -> Path:
    """Return the directory of a fixture, made in a process of its own if it is not there.

    All of its kind are made together: that takes 4 s, and one alone 3 s. `quant` is the bits
    of the weights over `dtype`; `tiny` gives the 2-layer variant.

    Raises:
        CalledProcessError: the script failed; what it said is on stderr.
    """
    names = TINY_NAMES if tiny else VISION_NAMES if name in VISION_NAMES else TEXT_NAMES
    label = ("tiny-" if tiny else "") + _DTYPE_LABELS[dtype] + (f"-q{quant}" if quant else "")
    targets = {each: _cache_dir() / f"{each}-{label}" for each in names}
    if not targets[name].is_dir():
        _cache_dir().mkdir(parents=True, exist_ok=True)
        with open(_cache_dir() / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed
            missing = [each for each, target in targets.items() if not target.is_dir()]
            if missing:
                _make(missing, dtype, quant, tiny)
    return targets[name]


def mlx_environment() -> dict[str, str]:
    """Return the environment for a process that runs MLX."""
    return {**os.environ, **openblas_environment(os.environ)}


def _make(names: list[str], dtype: str, quant: int | None, tiny: bool) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(_cache_dir())]
    command += ["--only", ",".join(names), "--dtype", dtype]
    command += ["--quant", str(quant)] if quant else []
    command += ["--tiny"] if tiny else []
    subprocess.run(
        command,
        check=True,
        env=mlx_environment(),
        stdout=subprocess.DEVNULL,
        timeout=MAKE_WAIT_S_MAX,
    )


@cache
def _cache_dir() -> Path:
    """Return the directory named after everything that a fixture is made from."""
    digest = hashlib.sha256()
    for source in (SCRIPT, PROJECT_DIR / "scripts" / "checkpoints.py"):
        digest.update(source.read_bytes())
    made_by = [platform.python_version(), version("mlx"), version("mlx-lm"), version("mlx-vlm")]
    digest.update(" ".join(made_by).encode())
    return Path("~/.cache/hearth-fixtures").expanduser() / digest.hexdigest()[:16]
