"""Defines what ranks tell each other beside operations: a list each, whose first item is its kind.

A follower says HELLO and gets WELCOME or REFUSED. Then it says HERE on its second connection, which
has the operations and their answers alone, so that a thread of its own can send them without a
lock. From then on it sends BEAT, WITNESS and EVENT as it goes, and FAILED before it ends itself.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final, Literal

from hearth.shared.errors import WireError
from hearth.shared.version import VERSION
from hearth.worker.ranks.rank_link import unpack

HELLO: Final = "hello"  # its rank, or None where its address says it; what it is made of
WELCOME: Final = "welcome"  # see RankWelcome
REFUSED: Final = "refused"  # why
HERE: Final = "here"  # its rank; the secret of the welcome
BEAT: Final = "beat"  # done, is waiting, said; limit and used bytes
WITNESS: Final = "witness"  # packed facts
EVENT: Final = "event"  # name, arguments
FAILED: Final = "failed"  # whether a restart may help; why

Purpose = Literal["serve", "check"]  # what the ranks are for


@dataclass(frozen=True, slots=True)
class RankWelcome:
    """What a follower is told once rank 0 knows it."""

    rank: int
    secret: bytes  # that it names on its second connection
    operations: str  # the endpoint of that
    hosts: list[str]
    tensors: dict[str, Any]  # how tensors travel; see rank_backends
    settings: dict[str, Any]  # those of rank 0 that decide what is computed, by field
    purpose: Purpose


def message(frame: bytes) -> list[Any]:
    """Return the message in `frame`. Raises: WireError."""
    items = unpack(frame)
    if not isinstance(items, list) or not items or not isinstance(items[0], str):
        raise WireError("no message of ranks")
    return items


def own_versions() -> dict[str, str]:
    """Return what every rank must have the same of: other code computes other bits, or other KV."""
    return {
        "hearth": VERSION,
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def difference(own: Mapping[str, Any], theirs: Any) -> str | None:
    """Return what differs between rank 0 and another rank, with both values; None where nothing."""
    if not isinstance(theirs, dict):
        return f"it says {theirs!r:.80} of itself"
    for name in dict.fromkeys([*own, *theirs]):
        if own.get(name) != theirs.get(name):
            return f"its {name} is {theirs.get(name)}, and rank 0's is {own.get(name)}"
    return None
