#!/usr/bin/env python
"""Measures parts of Hearth on this machine; asserts no timing. Whole servers: `hearth bench`.

    python -m scripts.bench macs
    python -m scripts.bench sizes [--models NAME,...] [--macs GB,...] [--sessions NAME,...]
    python -m scripts.bench front [--pairs 10] [--starts 5] [--beside CHECKOUT]

Each subcommand is a module of this directory with ABOUT, add_arguments(parser) and run(options),
which returns what --out FILE writes as JSON, or nothing.
"""

import argparse
import json
from pathlib import Path

from scripts.bench import front, mac_memory, sizes

COMMANDS = {
    "macs": mac_memory,
    "sizes": sizes,
    "front": front,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.ABOUT)
        command.add_argument("--out", type=Path, metavar="FILE")
        module.add_arguments(command)
    options = parser.parse_args()
    told = COMMANDS[options.command].run(options)
    if options.out:
        options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
