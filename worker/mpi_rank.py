"""Runs one rank that Open MPI started, with a worker's arguments: rank 0 is the worker itself."""

import argparse
import os
import sys
from collections.abc import Mapping

from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.shared.paths import env_file
from hearth.shared.settings_from_env import load_settings
from hearth.worker.ranks.transport.rank_processes import MPI_RANK_VARIABLE


def main(environ: Mapping[str, str]) -> int:
    rank = int(environ[MPI_RANK_VARIABLE])
    if rank == 0:
        from hearth.worker.main import main as run_worker

        return run_worker()
    from hearth.worker.ranks.follower_main import main as run_rank
    from hearth.worker.ranks.start_ranks import endpoints_of

    parser = argparse.ArgumentParser()
    parser.add_argument("--worker-id", type=int, required=True)
    worker_id: int = parser.parse_known_args()[0].worker_id
    try:
        endpoint, _ = endpoints_of(load_settings(environ, env_file()), worker_id)
    except StartError:  # rank 0 says so
        return EXIT_CANNOT_START
    sys.argv[1:] = ["--leader", endpoint, "--rank", str(rank)]
    return run_rank()


if __name__ == "__main__":
    code = main(os.environ)
    sys.stderr.flush()
    os._exit(code)  # threads that use MLX must not outlive the interpreter
