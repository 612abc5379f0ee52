"""Measures what the prefix cache itself costs: lookups, copies, kept bytes, CPU of long sessions.

No server runs. cache_micro.py measures, in a process of its own with the BLAS that workers have.
What the cache saves beside other servers, `hearth bench` tells.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.bench.serve import machine
from scripts.bench.servers import PROJECT_DIR, mlx_environment

ABOUT = "what lookups, copies and cuts of the prefix cache cost"
FIXTURES = "qwen3,qwen3_5,gpt_oss"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fixtures", default=FIXTURES, help=f"default {FIXTURES}")
    parser.add_argument("--pairs", type=int, default=20, help="of the cold-request comparison")
    parser.add_argument("--json", type=Path, help="default bench/cache-<host>.json")


def run(options: argparse.Namespace) -> None:
    """Measure, printing each figure as it comes, and write the JSON."""
    out = options.json or PROJECT_DIR / "bench" / f"cache-{platform.node()}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {**machine(), "micro": micro(options.fixtures, options.pairs)}
    told["load_after"] = os.getloadavg()
    out.write_text(json.dumps(told, indent=1) + "\n")
    print(f"written to {out}")


def micro(fixtures: str, pairs: int) -> dict[str, Any]:
    """Return the figures of a child with a fast BLAS; it prints as it goes."""
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as directory:
        out = Path(directory) / "micro.json"
        command = [sys.executable, "-m", "scripts.bench.cache_micro", "--json", str(out)]
        command += ["--fixtures", fixtures, "--pairs", str(pairs)]
        subprocess.run(command, cwd=PROJECT_DIR, env=mlx_environment(), check=True)
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures
