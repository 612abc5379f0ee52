"""Refuses ranks that loaded another model than rank 0, before the first request."""

from collections.abc import Mapping, Sequence
from typing import Any

from hearth.shared.errors import StartError
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.ranks.transport.link_messages import difference

REMEDIES = {
    "dtype": "Set DTYPE to bfloat16 or float16: auto goes by each machine's chip.",
    "files": "Fetch the model anew where it is older: hearth pull.",
}


def model_facts(loaded: LoadedModel) -> dict[str, Any]:
    """Return what must be the same on all ranks. Waits until the weights are hashed.

    Raises: OSError, SystemExit, as `WeightsIdentity.parts` does.
    """
    files = dict(part.rsplit(" ", 1) for part in loaded.identity.parts())
    return {"dtype": loaded.dtype.name, **files}


def check_same_model(
    own: Mapping[str, Any], others: Sequence[Mapping[str, Any]], hosts: Sequence[str]
) -> None:
    """Compare rank 0's facts with those of ranks 1 and up, in this order. Raises: StartError."""
    for rank, theirs in enumerate(others, 1):
        if wrong := difference(own, theirs):
            remedy = REMEDIES["dtype" if own["dtype"] != theirs.get("dtype") else "files"]
            who = f"Rank {rank} of {len(hosts)} ({hosts[rank]})"
            raise StartError(f"{who} cannot take part: {wrong}. {remedy}")
