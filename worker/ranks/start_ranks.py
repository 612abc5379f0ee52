"""Has rank 0 of a model start the ranks of its machine and wait for the others, before it loads.

A follower ends itself when its standard input reaches its end, which it does however rank 0 dies.
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

STATUS_WAIT_S: Final = 2.0  # for the status of a process whose connection ended
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
        """Start one process a rank; each has its own end of a pipe as its standard input.

        `on_end` is told a rank and how it ended, on a thread of its own.
        """
        for rank in ranks:
            process = self._processes[rank] = subprocess.Popen(
                [*command, "--leader", endpoint, "--rank", str(rank)],
                stdin=subprocess.PIPE,  # held open for as long as this process lives
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
        """Return how the process of `rank`, whose connection ended, ended; "" = it is not known.

        The system closes the connections of a process some time before it tells its status.
        """
        with contextlib.suppress(KeyError, subprocess.TimeoutExpired):
            return how_ended(self._processes[rank].wait(STATUS_WAIT_S))
        return ""

    def kill(self) -> None:
        """End them now; one that was stopped would not see that its standard input ends."""
        for process in self._processes.values():
            process.kill()

    def close(self) -> None:
        """Have all of them end, and wait for it."""
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
    """Return how a process ended, from its return code."""
    return f"it ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"


log = logging.getLogger(__name__)

# What a follower computes follows from these; it has them from rank 0. What is a machine's own
# (directories, memory, keys, leave to run a model's code) is not among them.
TOLD_SETTINGS: Final = (
    *("model_path", "dtype", "prefill_chunk", "max_kv_size", "cache_exact"),
    *("kv_bits", "kv_group_size", "quantized_kv_start"),
    *("cache_store_bits", "kv_quant_scheme"),
    *("live_slots_max", "max_concurrent_requests", "stall_seconds"),
    *("ranks", "rank_split", "max_kv_size_gb"),
)

# What is off -> why.
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
    """What rank 0 has once all ranks are there."""

    link: LeaderLink
    group: Any  # mx.distributed.Group
    processes: RankProcesses  # of this machine


def start_ranks(
    settings: Settings,
    worker_id: int,
    leave: Callable[[str], None],
    is_over: Callable[[], bool] = lambda: False,
    command: Sequence[str] = FOLLOWER,
    purpose: Purpose = "serve",
) -> StartedRanks:
    """Start the ranks of this machine, wait for the others, and join them all. Inference thread.

    `leave` is told why this process ends, if it does.

    Raises:
        StartError: a setting is wrong, or MLX cannot connect the ranks.
        SystemExit: the process ends.
    """
    refuse_settings(settings)
    hosts = read_hosts(settings.rank_hosts, settings.ranks)
    local = are_local(hosts)
    tensors = plan_tensors(hosts, local)
    told = {"tensors": tensors, "settings": told_settings(settings), "purpose": purpose}
    keys = rank_keys(settings) if settings.rank_hosts else None
    processes = RankProcesses()
    end = functools.partial(_end_process, leave, processes)
    context = RankContext(keys, is_leader=True)
    endpoints = endpoints_of(settings, worker_id, hosts[0].name)
    link = LeaderLink(hosts, settings.stall_seconds, told, context, endpoints, end)
    ranks = [rank for rank in range(1, settings.ranks) if local[rank]]
    link.how_ended = processes.how_ended
    processes.start(ranks, link.endpoint, link.lose, command)
    elsewhere = [host.name for host, is_here in zip(hosts, local, strict=True) if not is_here]
    if elsewhere:
        where = link.endpoint.removeprefix("tcp://")
        names = ", ".join(elsewhere)
        log.info("waiting for ranks on %s: run there hearth ranks join %s", names, where)
    link.wait_for_all(is_over)
    return StartedRanks(link, join_group(tensors, 0, settings.ranks), processes)


def refuse_settings(settings: Settings) -> None:
    """Raise StartError where a setting asks for what several ranks cannot do."""
    asked = {
        "KV_BITS": str(settings.kv_bits or ""),
        "DRAFT_MODEL": settings.draft_model,
        "ADAPTERS": ",".join(name for name, _ in settings.adapters),
    }
    for name, value in asked.items():
        if value:
            raise StartError(
                f"RANKS is {settings.ranks} and {name} is {value!r}, which a model over several "
                f"ranks cannot have (docs/ranks.md). Leave {name} empty, or set RANKS=1."
            )


def told_settings(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in TOLD_SETTINGS}


def with_told(settings: Settings, told: dict[str, Any]) -> Settings:
    """Return a follower's settings with those that rank 0 told it.

    Raises:
        StartError: rank 0 told others than this rank knows.
    """
    if told.keys() != set(TOLD_SETTINGS):
        raise StartError("Rank 0 tells other settings than this rank knows: update both.")
    return dataclasses.replace(settings, **told)


def rank_keys(settings: Settings) -> CurveKeys:
    """Return the keys with which ranks on several machines know each other. Raises: StartError."""
    return curve_keys(settings.curve_keys_dir, RANK_NAME, RANK_NAME)


def endpoints_of(settings: Settings, worker_id: int, host: str = LOOPBACK) -> tuple[str, str]:
    """Return where rank 0 on `host` takes what followers say, and where it tells operations."""
    if settings.rank_hosts:
        shown = f"[{host}]" if ":" in host else host
        return f"tcp://{shown}:{settings.rank_port}", f"tcp://{shown}:0"
    directory = settings.instance_dir
    names = (f"ranks-{worker_id}.sock", f"ranks-{worker_id}-told.sock")
    return ipc_endpoint(directory / names[0]), ipc_endpoint(directory / names[1])


def _end_process(
    leave: Callable[[str], None], processes: RankProcesses, code: int, why: str
) -> None:
    """End this process and the ranks that it started, whatever its threads do.

    One of them may hang in a collective for ever, and none has anything that could still be told.
    """
    leave(why)
    processes.kill()
    os._exit(code)
