"""Says for people over which ranks a model runs, what each takes, and what is off over ranks."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from hearth.worker.ranks.rank_link import RankRoom

# What a model over several ranks does without -> why.
OFF: Final[Mapping[str, str]] = MappingProxyType(
    {
        "drafts": "ranks compute one token a step for each answer; rows of drafts are not told",
        "trunks": "ranks are told which rows a batch has, and not what they share",
        "images": "rank 0 alone would have the encoder and the positions of images",
        "kv_bits": "live caches are packed by rows of all heads; no rank is told to",
        "adapters": "the layers of an adapter are not split between ranks",
        "checks": "each forward of a check would have to be told; see hearth ranks check",
    }
)


def rank_report(
    hosts: Sequence[str], split: str, used_bytes: int, rooms: Mapping[int, RankRoom]
) -> dict[str, Any]:
    """Return for `/v1/cache` the ranks; `used_bytes` are rank 0's, `rooms` the others'."""
    rows: list[dict[str, Any]] = [{"rank": 0, "host": hosts[0], "used_bytes": used_bytes}]
    for rank, host in enumerate(hosts[1:], 1):
        room = rooms.get(rank, RankRoom(0, 0))
        row = {"rank": rank, "host": host, "used_bytes": room.used_bytes}
        rows.append(row | {"limit_bytes": room.limit_bytes})
    return {"count": len(hosts), "split": split, "ranks": rows, "off": dict(OFF)}
