"""Has rank 0 of a model wait for the other ranks, before it loads its part."""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hearth.shared.errors import StartError
from hearth.shared.settings import Settings
from hearth.shared.zmq_rank_port import RankContext
from hearth.shared.zmq_transport import RANK_NAME, CurveKeys, curve_keys, ipc_endpoint
from hearth.worker.ranks.transport.leader_link import LeaderLink
from hearth.worker.ranks.transport.link_messages import Purpose
from hearth.worker.ranks.transport.rank_hosts import LOOPBACK, are_local, read_hosts
from hearth.worker.ranks.transport.rank_processes import FOLLOWER, RankProcesses
from hearth.worker.ranks.transport.tensor_group import join_group, plan_tensors

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
