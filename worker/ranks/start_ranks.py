"""Starts the ranks of rank 0's machine and waits for those of other machines, before loading.

A local follower ends when its standard input closes, which happens however rank 0 dies.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hearth.shared.errors import StartError
from hearth.shared.settings import Settings
from hearth.shared.zmq_rank_port import RankContext
from hearth.shared.zmq_transport import RANK_NAME, CurveKeys, curve_keys, ipc_endpoint
from hearth.worker.ranks.leader_link import LeaderLink
from hearth.worker.ranks.rank_hosts import LOOPBACK, are_local, join_group, plan_tensors, read_hosts
from hearth.worker.ranks.rank_link import Purpose

STATUS_WAIT_S: Final = 2.0  # time for the status of a process whose connection ended
FOLLOWER: Final = (sys.executable, "-m", "hearth.worker.ranks.follower_main")


class RankProcesses:
    """Holds the processes of local followers. Owner: the inference thread.

    Any thread may call `kill` and `how_ended`.
    """

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._watchers: list[threading.Thread] = []

    def start(
        self,
        ranks: Iterable[int],
        endpoint: str,
        on_end: Callable[[int, str], None],
        command: Sequence[str] = FOLLOWER,
    ) -> None:
        """Start one process per rank, with a pipe from this process as its standard input.

        `on_end` runs on a thread of its own; it is given a rank and how its process ended.
        """
        for rank in ranks:
            process = self._processes[rank] = subprocess.Popen(
                [*command, "--leader", endpoint, "--rank", str(rank)],
                stdin=subprocess.PIPE,  # stays open while this process lives
                env=os.environ,
            )
            watcher = threading.Thread(
                target=_watch, args=(process, rank, on_end), name="rank process", daemon=True
            )
            self._watchers.append(watcher)
            watcher.start()

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def how_ended(self, rank: int) -> str:
        """Return how the local process of `rank` ended; "" if it is unknown.

        Called after the rank's connection ended; the process's exit status follows a little later.
        """
        with contextlib.suppress(KeyError, subprocess.TimeoutExpired):
            return how_ended(self._processes[rank].wait(STATUS_WAIT_S))
        return ""

    def kill(self) -> None:
        """Kill all processes; a suspended one would not notice that its standard input closed."""
        for process in self._processes.values():
            process.kill()

    def close(self) -> None:
        """Make all processes end, and wait for their end."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for watcher in self._watchers:
            watcher.join()


def _watch(
    process: "subprocess.Popen[bytes]", rank: int, on_end: Callable[[int, str], None]
) -> None:
    on_end(rank, how_ended(process.wait()))


def how_ended(code: int) -> str:
    """Return in words how a process with this return code ended."""
    return f"it ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"


log = logging.getLogger(__name__)

# Settings that decide what a follower computes; rank 0 sends its own to all followers. A machine's
# own settings (directories, memory, keys, permission to run a model's code) are not among them.
SHARED_SETTINGS: Final = (
    *("model_path", "dtype", "prefill_chunk", "max_kv_size", "cache_exact"),
    *("kv_bits", "kv_group_size", "quantized_kv_start"),
    *("cache_store_bits", "kv_quant_scheme"),
    *("live_slots_max", "max_concurrent_requests", "stall_seconds"),
    *("ranks", "rank_split", "max_kv_size_gb"),
)

# Feature that a model of several ranks lacks -> reason.
OFF: Final = {
    "drafts": "a draft's forward, and how much of it holds, are not told to the other ranks",
    "shared trunks": "attention over a shared trunk was never compared over ranks",
    "images": "vision towers are not split, so that text alone is loaded",
    "kv_bits": "rows that are packed while they run were never compared over ranks",
    "adapters": "mlx-lm splits no adapter",
    "idle checks": "hearth doctor checks one process; hearth ranks check compares the ranks",
}


@dataclass(frozen=True, slots=True)
class StartedRanks:
    """Rank 0's links to the ranks, once all of them have joined."""

    link: LeaderLink
    group: Any  # mx.distributed.Group
    processes: RankProcesses  # followers on this machine


def start_ranks(
    settings: Settings,
    worker_id: int,
    leave: Callable[[str], None],
    is_over: Callable[[], bool] = lambda: False,
    command: Sequence[str] = FOLLOWER,
    purpose: Purpose = "serve",
) -> StartedRanks:
    """Start the ranks of this machine, wait for the others, and join all. Inference thread.

    `leave` is called with the reason if this process has to end.

    Raises:
        StartError: a setting is wrong, or MLX cannot connect the ranks.
        SystemExit: the process ends.
    """
    refuse_settings(settings)
    hosts = read_hosts(settings.rank_hosts, settings.ranks)
    local = are_local(hosts)
    tensors = plan_tensors(hosts, local)
    welcome_fields = {"tensors": tensors, "settings": shared_settings(settings), "purpose": purpose}
    keys = rank_keys(settings) if settings.rank_hosts else None
    processes = RankProcesses()
    end = functools.partial(_end_process, leave, processes)
    context = RankContext(keys, is_leader=True)
    endpoints = endpoints_of(settings, worker_id, hosts[0].name)
    link = LeaderLink(hosts, settings.stall_seconds, welcome_fields, context, endpoints, end)
    ranks = [rank for rank in range(1, settings.ranks) if local[rank]]
    link.how_ended = processes.how_ended
    processes.start(ranks, link.endpoint, link.report_lost, command)
    elsewhere = [host.name for host, is_here in zip(hosts, local, strict=True) if not is_here]
    if elsewhere:
        where = link.endpoint.removeprefix("tcp://")
        names = ", ".join(elsewhere)
        log.info("waiting for ranks on %s: run there hearth ranks join %s", names, where)
    link.wait_for_all(is_over)
    return StartedRanks(link, join_group(tensors, 0, settings.ranks), processes)


def refuse_settings(settings: Settings) -> None:
    """Raise StartError if a setting asks for a feature that several ranks do not have."""
    refused = {
        "KV_BITS": str(settings.kv_bits or ""),
        "DRAFT_MODEL": settings.draft_model,
        "ADAPTERS": ",".join(name for name, _ in settings.adapters),
    }
    for name, value in refused.items():
        if value:
            raise StartError(
                f"RANKS is {settings.ranks} and {name} is {value!r}, which a model over several "
                f"ranks cannot have (docs/ranks.md). Leave {name} empty, or set RANKS=1."
            )


def shared_settings(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in SHARED_SETTINGS}


def with_shared(settings: Settings, received: dict[str, Any]) -> Settings:
    """Return a follower's settings, updated with those received from rank 0.

    Raises:
        StartError: rank 0 sent other settings than this rank knows.
    """
    if received.keys() != set(SHARED_SETTINGS):
        raise StartError("Rank 0 tells other settings than this rank knows: update both.")
    return dataclasses.replace(settings, **received)


def rank_keys(settings: Settings) -> CurveKeys:
    """Return the keys for connections between ranks on several machines. Raises: StartError."""
    return curve_keys(settings.curve_keys_dir, RANK_NAME, RANK_NAME)


def endpoints_of(settings: Settings, worker_id: int, host: str = LOOPBACK) -> tuple[str, str]:
    """Return the endpoints of rank 0 on `host`: for the followers' status, and for operations."""
    if settings.rank_hosts:
        shown = f"[{host}]" if ":" in host else host
        return f"tcp://{shown}:{settings.rank_port}", f"tcp://{shown}:0"
    directory = settings.instance_dir
    names = (f"ranks-{worker_id}.sock", f"ranks-{worker_id}-told.sock")
    return ipc_endpoint(directory / names[0]), ipc_endpoint(directory / names[1])


def _end_process(
    leave: Callable[[str], None], processes: RankProcesses, code: int, why: str
) -> None:
    """End this process and the ranks that it started, without waiting for its threads.

    A thread may hang in a collective for ever, and no thread has anything left to send.
    """
    leave(why)
    processes.kill()
    os._exit(code)
