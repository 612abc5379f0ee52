#!/usr/bin/env python
"""Measures Hearth beside others on this machine; nothing here asserts a timing.

    scripts/bench.py serve [--pairs 20] [--model DIR] [--sides raw,server,hearth] [--out FILE]
    scripts/bench.py vision [--fixtures qwen3_vl] [--pairs 20] [--out FILE]
    scripts/bench.py watching [--pairs 20] [--tokens 4000] [--beside CHECKOUT] [--out FILE]
    scripts/bench.py cache [--fixtures qwen3] [--traces NAME,...] [--limit N] [--only replay|micro]
    scripts/bench.py peers [--quick] [--sides hearth,mlx_lm,...] [--peer NAME=URL]

Each subcommand is a module of this directory with ABOUT, add_arguments(parser) and run(options).
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import bench_cache, bench_peers, bench_serve, bench_vision, bench_watching

COMMANDS = {
    "serve": bench_serve,
    "cache": bench_cache,
    "vision": bench_vision,
    "watching": bench_watching,
    "peers": bench_peers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.ABOUT))
    options = parser.parse_args()
    COMMANDS[options.command].run(options)


if __name__ == "__main__":
    main()
