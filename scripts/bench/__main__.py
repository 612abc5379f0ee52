#!/usr/bin/env python
"""Measures parts of Hearth on this machine; asserts no timing. Whole servers: `hearth bench`.

    python -m scripts.bench serve [--pairs 20] [--model DIR] [--sides raw,hearth] [--out FILE]
    python -m scripts.bench vision [--fixtures qwen3_vl] [--pairs 20] [--out FILE]
    python -m scripts.bench watching [--pairs 20] [--tokens 4000] [--beside CHECKOUT] [--out FILE]
    python -m scripts.bench front [--pairs 10] [--starts 5] [--beside CHECKOUT] [--out FILE]
    python -m scripts.bench stored [--models pocket,random128] [--prompts 40] [--out FILE]
    python -m scripts.bench cache [--fixtures qwen3] [--pairs 20] [--json FILE]
    python -m scripts.bench macs [--only lives|contexts|rooms|calls] [--workers 4]
    python -m scripts.bench sizes [--models NAME,...] [--macs GB,...] [--sessions NAME,...]
    python -m scripts.bench beside [--fixture qwen3] [--tokens 16000] [--goal SECONDS]
    python -m scripts.bench drafts [--sets NAME,...] [--states] [--others] [--out FILE]
    python -m scripts.bench trunk [--trunks 4096,16384] [--branches 8] [--bits 4] [--out FILE]
    python -m scripts.bench embeddings [--texts 1000] [--embedding DIR] [--rounds 5]
    python -m scripts.bench ranks [--only families|talks|traces] [--sizes 2,3] [--out FILE]
    python -m scripts.bench routing [--workers 1,2,4,8] [--rules NAME,...] [--sessions 2x]

Each subcommand is a module of this directory with ABOUT, add_arguments(parser) and run(options).
"""

import argparse

from scripts.bench import (
    beside,
    cache,
    dashboard_cost,
    drafts,
    embeddings,
    front,
    mac_memory,
    serve,
    stored_kv,
    trunk,
    vision,
)
from scripts.bench.ranks import ranks
from scripts.bench.real_sizes import sizes
from scripts.bench.routing import routing

COMMANDS = {
    "serve": serve,
    "cache": cache,
    "vision": vision,
    "stored": stored_kv,
    "watching": dashboard_cost,
    "front": front,
    "macs": mac_memory,
    "sizes": sizes,
    "beside": beside,
    "drafts": drafts,
    "trunk": trunk,
    "embeddings": embeddings,
    "ranks": ranks,
    "routing": routing,
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
