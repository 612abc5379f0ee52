"""Plays faults and long loads against a server of its own, and judges what comes of them.

    python -m scripts.faults chaos [--minutes 10] [--only "disk full"] [--ranks 2]   processes, disk
    python -m scripts.faults soak [--requests 10000]                    memory, files, threads
    python -m scripts.faults keys [--probes 400] [--shared]             what time tells another key
    python -m scripts.faults ranks [--episodes 100] [--plant dropped]   warm = cold over ranks

--json FILE writes what was seen. Exit status: 0 all of it held, 1 something did not, 2 the server
does not start.
"""

import argparse
import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import Any, Final

from hearth.proxy.main import end
from scripts.faults.own_server import ServerError

ONLY: Final = {"action": "append", "default": [], "help": "one by its printed name; repeat it"}
OPTIONS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "chaos": {
        "--minutes": {"type": float, "default": 10.0},
        "--ranks": {"type": int, "default": 1},
        "--only": ONLY,
    },
    "soak": {"--requests": {"type": int, "default": 10_000}},
    "keys": {
        "--probes": {"type": int, "default": 400, "help": "of each route"},
        "--only": ONLY,
        "--shared": {"action": "store_true"},
    },
    "ranks": {
        "--episodes": {"type": int, "default": 100},
        "--ranks": {"type": int, "default": 2},
        "--plant": {"choices": ("order", "dropped", "changed", "noise")},
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, rows in OPTIONS.items():
        command = commands.add_parser(name)
        for option, how in rows.items():
            command.add_argument(option, **how)
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    module = importlib.import_module(f"scripts.faults.{options.command}")
    try:
        told = getattr(module, options.command)(options)
        told = asyncio.run(told) if asyncio.iscoroutine(told) else told
    except ServerError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    for text, count in told["misses"].items():
        print(f"MISSED {count}x: {text}")
    print("verdict: " + ("MISSED" if told["misses"] else "all of it held"))
    return 1 if told["misses"] else 0


if __name__ == "__main__":
    end(main())  # threads that use MLX must not outlive the interpreter
