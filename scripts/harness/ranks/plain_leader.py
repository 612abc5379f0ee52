"""Leads plain followers without a model, as a worker would: for tests of how ranks are lost.

    python -m scripts.harness.ranks.plain_leader ENDPOINT idle|sums [SHAPE]

Prints a JSON object with the pids of the followers once all ranks are joined, then waits, or sums
with them without end. ENDPOINT is that of a worker, beside which the reason of its end is left.
"""

import json
import os
import sys
import threading

import mlx.core as mx

from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.shared.settings_from_env import load_settings
from hearth.worker.ranks.start_ranks import StartedRanks, start_ranks

COMMAND = (sys.executable, "-m", "scripts.harness.ranks.plain_follower")


def sum_for_ever(ranks: StartedRanks, size: int) -> None:
    while True:
        ranks.link.tell("sum", size)
        ranks.link.witness("sum", size)
        mx.eval(mx.distributed.all_sum(mx.ones(size), group=ranks.group))


def main(endpoint: str, what: str, size: str = "262144") -> int:
    settings = load_settings(os.environ, None)
    try:
        ranks = start_ranks(settings, 0, endpoint, command=COMMAND)
    except StartError as error:
        print(error, file=sys.stderr)
        return EXIT_CANNOT_START
    print(json.dumps({"pids": ranks.processes.pids}), flush=True)
    if what == "idle":
        threading.Event().wait()
    try:
        sum_for_ever(ranks, int(size))
    except RuntimeError:  # what MLX raises where the rank beside is gone
        ranks.link.wait_for_failure()
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
