"""Runs one of ranks 1 to N - 1 of a model: `python -m hearth.worker.ranks.follower_main`.

Rank 0 starts those on its own machine, `hearth ranks join` those on others. It ends when rank 0 is
gone, or when its standard input reaches its end; it never waits in a collective for either.
"""

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from hearth.shared.errors import EXIT_CANNOT_START, EXIT_RANK_LOST, StartError
from hearth.shared.logging_setup import configure
from hearth.shared.process_start import begin_process
from hearth.shared.settings_from_env import Settings
from hearth.shared.zmq_rank_port import RankContext
from hearth.worker.ranks.follower_setup import follow
from hearth.worker.ranks.rank_link import RankLost
from hearth.worker.ranks.start_ranks import rank_keys, with_told
from hearth.worker.ranks.transport.follower_link import FollowerLink
from hearth.worker.ranks.transport.rank_check import follow_check
from hearth.worker.ranks.transport.tensor_group import join_group

log = logging.getLogger("hearth.worker.ranks")

OTHER_REASON_S = 1.0  # for rank 0 to find that another rank is why a collective failed

Follow = Callable[[FollowerLink, Any, Settings], None]  # (link, group, settings)


def run_follower(serve: Follow) -> int:
    """Join rank 0 and do what it tells, by `serve`, until it is gone; return the exit code."""
    options = _options()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when a rank ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()
    try:
        settings = begin_process(_name(options.rank))
        keys = rank_keys(settings) if options.leader.startswith("tcp://") else None
        context = RankContext(keys, is_leader=False)
        link = FollowerLink(context, options.leader, options.address, _end)
        welcome = link.join(options.rank)
    except StartError as error:
        print(f"This rank cannot start: {error}", file=sys.stderr, flush=True)
        return EXIT_CANNOT_START
    except RankLost as error:
        _end(EXIT_RANK_LOST, str(error))
    configure(settings.log_level.upper(), _name(link.rank), settings.log_prompts)
    try:
        group = join_group(welcome.tensors, link.rank, link.size)
        how = serve if welcome.purpose == "serve" else follow_check
        how(link, group, with_told(settings, welcome.settings))
    except StartError as error:
        link.fail(error)
    except Exception as error:
        log.exception("this rank broke")
        threading.Event().wait(OTHER_REASON_S)
        link.fail(error)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hearth.worker.ranks.follower_main", description=__doc__)
    parser.add_argument("--leader", required=True, help="the endpoint of rank 0")
    parser.add_argument("--rank", type=int, help="left out: rank 0 knows it by its address")
    parser.add_argument("--address", default="", help="of this machine, to connect from")
    return parser.parse_args()


def _name(rank: int | None) -> str:
    return "rank" if not rank else f"rank-{rank}"


def _end(code: int, why: str) -> NoReturn:
    """End this process, whatever its main thread does: it may hang in a collective."""
    log.info("this rank ends: %s", why)
    sys.stderr.flush()
    os._exit(code)


def _end_with_stdin() -> None:
    """End this process once whoever started it is gone."""
    while os.read(0, 4096):
        pass
    _end(0, "who started it is gone")


if __name__ == "__main__":
    code = run_follower(follow)
    sys.stderr.flush()
    os._exit(code)  # threads that use MLX must not outlive the interpreter
