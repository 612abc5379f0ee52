"""Leads followers without a model, as a worker would: for tests of how ranks are lost.

    python -m scripts.harness.ranks.plain_leader ENDPOINT idle|sums

Prints a JSON object with the pids of the followers once all ranks are joined, then waits, or sums
with them without end. ENDPOINT is that of a worker, beside which the reason of its end is left.
"""

import json
import os
import sys
import threading
from functools import partial

import mlx.core as mx

from hearth.shared.settings import load_settings
from hearth.shared.worker_files import leave_reason
from hearth.worker.ranks.start_ranks import start_ranks
from scripts.harness.ranks.models_follower import COMMAND

SIZE = 262_144  # numbers of a sum


def main(endpoint: str, what: str) -> None:
    settings, leave = load_settings(os.environ, None), partial(leave_reason, endpoint)
    ranks = start_ranks(settings, 0, leave, command=COMMAND)
    print(json.dumps({"pids": ranks.processes.pids}), flush=True)
    if what == "idle":
        threading.Event().wait()
    try:
        while True:
            ranks.link.send("sum", SIZE)
            ranks.link.witness("sum", SIZE)
            mx.eval(mx.distributed.all_sum(mx.ones(SIZE), group=ranks.group))
    except RuntimeError:  # what MLX raises where the rank beside is gone
        ranks.link.wait_for_failure()
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
