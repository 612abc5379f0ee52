"""Helps with a model that several processes, on one machine or more, compute together.

    hearth ranks join 192.168.2.1      be a rank of the server on that address
    hearth ranks check                 on rank 0's machine: measure and compare all ranks

What a server needs for that is told in docs/ranks.md.
"""

import argparse
import sys
from collections.abc import Sequence

from hearth.shared.settings import RANK_PORT_ABOVE


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    if options.what == "join":
        from hearth.commands.ranks.join_ranks import join_for_ever

        return join_for_ever(options.leader, options.address)
    from hearth.commands.ranks.check_ranks import check

    return check()


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hearth ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="what", required=True, metavar="join|check")
    join = commands.add_parser("join", help="be a rank of the server on another machine")
    join.add_argument(
        "leader",
        metavar="ADDRESS[:PORT]",
        help=f"of rank 0, as its host file has it; the port is {RANK_PORT_ABOVE} above PROXY_PORT",
    )
    join.add_argument(
        "--address", default="", help="of this machine, where it has several that lead there"
    )
    commands.add_parser("check", help="measure and compare all ranks; the server must not run")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
