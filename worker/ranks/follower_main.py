"""Runs one of ranks 1 to N - 1 of a model: `python -m hearth.worker.ranks.follower_main`.

Rank 0 starts those on its own machine, `hearth ranks join` those on others. It ends when rank 0 is
gone, or when its standard input reaches its end; it never waits in a collective for either.
"""

import signal

if __name__ == "__main__":  # before the imports below, which take seconds
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when a rank ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

import argparse
import dataclasses
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import mlx.core as mx

from hearth.shared.errors import EXIT_CANNOT_START, EXIT_RANK_LOST, StartError
from hearth.shared.logging_setup import configure
from hearth.shared.process_start import begin_process
from hearth.shared.settings import Settings
from hearth.shared.zmq_rank_port import RankContext
from hearth.worker.engine import mlx_lm_open_files  # noqa: F401  before all that imports mlx_lm

# isort: split
from hearth.worker.cache.block_hash import PrefixHash, schema_root
from hearth.worker.disk.file_store import FileStore
from hearth.worker.disk.open_file_store import open_file_store
from hearth.worker.doctor.checked_machine import chip
from hearth.worker.engine.engine import leave_device
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.ranks.agreed_tokens import Sum, sum_over
from hearth.worker.ranks.follower import Follower, FollowerMemory
from hearth.worker.ranks.follower_link import FollowerLink
from hearth.worker.ranks.rank_check import follow_check
from hearth.worker.ranks.rank_hosts import join_group
from hearth.worker.ranks.rank_link import RankLost
from hearth.worker.ranks.sharded_model import Sharded
from hearth.worker.ranks.start_ranks import rank_keys, with_told
from hearth.worker.setup.kv_setup import identify

log = logging.getLogger("hearth.worker.ranks")

OTHER_REASON_S = 1.0  # for rank 0 to find that another rank is why a collective failed

Follow = Callable[[FollowerLink, Any, Settings], None]  # (link, group, settings)


def run_follower(serve: Follow) -> int:
    """Join rank 0 and do what it tells, by `serve`, until it is gone; return the exit code."""
    options = _options()
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


# ---------------------------------------------------------------- what computes


def make_follower(
    link: FollowerLink,
    group: mx.distributed.Group,
    settings: Settings,
    summing: Callable[[mx.distributed.Group], Sum] = sum_over,
) -> Follower:
    """Return what does as rank 0 tells by `link`, with this rank's part of the model."""
    memory = FollowerMemory(settings, link)

    def load(dtype: str, ranks_here: Sequence[int]) -> LoadedModel:
        """Load this rank's part, to be computed in `dtype`, whatever is found of it here."""
        memory.share(ranks_here[link.rank])
        part = Sharded(group, settings.rank_split)
        name = functools.partial(identify, settings, lambda: False)
        meant = dataclasses.replace(settings, dtype=dtype)
        loaded = load_model(meant, admit=memory.admit, identify=name, part=part)
        memory.loaded(loaded)
        return loaded

    def open_store(root: PrefixHash, label: str, hosts: Sequence[str]) -> FileStore | None:
        return open_followed_store(settings, link.rank, root, label, hosts)

    return Follower(link, load, summing(group), memory, open_store)


def follow(link: FollowerLink, group: mx.distributed.Group, settings: Settings) -> None:
    """Do as rank 0 tells until it says stop; leave the device, and wait for rank 0's end."""
    make_follower(link, group, settings).run()
    leave_device()
    link.answer(None)
    link.next()  # nothing comes: this process ends with rank 0's


def open_followed_store(
    settings: Settings, rank: int, root: PrefixHash, cut_label: str, hosts: Sequence[str]
) -> FileStore | None:
    """Return a rank's files of rank 0's `root`; None where nothing is written.

    `hosts` are the ranks', in order. The root of its own names the rank and its chip, so that a
    file that is moved between machines or directories passes for no other's.

    Raises:
        StartError: the directory is another user's.
    """
    directory = settings.kv_cache_dir / f"rank-{rank}-of-{len(hosts)}"
    own_root = schema_root([root.hex(), f"rank {rank}", chip()])
    own = dataclasses.replace(settings, kv_cache_dir=directory)
    return open_file_store(own_root, own, cut_label, ranks_here=[*hosts].count(hosts[rank]))


if __name__ == "__main__":
    code = run_follower(follow)
    sys.stderr.flush()
    os._exit(code)  # threads that use MLX must not outlive the interpreter
