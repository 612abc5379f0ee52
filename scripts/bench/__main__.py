#!/usr/bin/env python
"""Measures parts of Hearth on this machine; asserts no timing. Whole servers: `hearth bench`.

    python -m scripts.bench cache [--only PART] [--json FILE]
    python -m scripts.bench stored [--models pocket,DIR] [--prompts 20] [--out FILE]
    python -m scripts.bench macs
    python -m scripts.bench sizes [--models NAME,...] [--macs GB,...] [--sessions NAME,...]
    python -m scripts.bench beside [--fixture qwen3] [--tokens 16000] [--goal SECONDS]
    python -m scripts.bench drafts [--sets NAME,...] [--states] [--out FILE]
    python -m scripts.bench front [--pairs 10] [--starts 5] [--beside CHECKOUT] [--out FILE]

Each subcommand is a module of this directory with ABOUT, add_arguments(parser) and run(options).
"""

import argparse

from scripts.bench import beside, cache, drafts, front, mac_memory, sizes, stored_kv

COMMANDS = {
    "cache": cache,
    "stored": stored_kv,
    "macs": mac_memory,
    "sizes": sizes,
    "beside": beside,
    "drafts": drafts,
    "front": front,
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
