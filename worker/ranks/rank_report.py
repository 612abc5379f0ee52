"""Says for people over which ranks a model runs, what each takes, and what is off over ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from hearth.worker.ranks.rank_link import RankRoom
from hearth.worker.ranks.start_ranks import OFF


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
