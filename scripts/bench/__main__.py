#!/usr/bin/env python
"""Measures parts of Hearth on this machine; asserts no timing. Whole servers: `hearth bench`.

    python -m scripts.bench macs
    python -m scripts.bench sizes [--models NAME,...] [--macs GB,...] [--sessions NAME,...]
    python -m scripts.bench front [--pairs 10] [--starts 5] [--beside CHECKOUT]

Each subcommand is a module of this directory with run(options), which returns what --out FILE
writes as JSON, or nothing.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Final

from hearth.commands.replay.traces import TRACES_DIR
from scripts.bench import front, mac_memory, sizes

COMMANDS: Final[dict[str, tuple[Any, dict[str, dict[str, Any]]]]] = {
    "macs": (mac_memory, {}),
    "sizes": (
        sizes,
        {
            "--models": {"default": "", "help": "names, comma-separated; default all"},
            "--macs": {"default": "", "help": "GB of memory, comma-separated; default all"},
            "--sessions": {"default": "", "help": "names of traces; default all"},
            "--traces-dir": {"type": Path, "default": TRACES_DIR},
            "--limit": {"type": int, "default": 0, "help": "requests of each trace; 0 = all"},
            "--pause": {"type": float, "default": 0.0, "help": "seconds between two turns"},
            "--each": {"action": "store_true", "help": "a row for each session too"},
            "--set": {
                **{"action": "append", "default": [], "metavar": "NAME=VALUE"},
                "help": "a setting",
            },
        },
    ),
    "front": (
        front,
        {
            "--pairs": {"type": int, "default": 10},
            "--starts": {"type": int, "default": 5, "help": "of each side, one after the other"},
            "--beside": {"type": Path, "help": "another checkout"},
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, rows) in COMMANDS.items():
        command = commands.add_parser(name, help=module.__doc__.splitlines()[0])
        command.add_argument("--out", type=Path, metavar="FILE")
        for option, how in rows.items():
            command.add_argument(option, **how)
    options = parser.parse_args()
    told = COMMANDS[options.command][0].run(options)
    if options.out:
        options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
