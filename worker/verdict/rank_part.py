"""Tells what one rank has of a model that several compute, before anything of it is there.

mlx-lm splits a model of arrays that are not evaluated as it splits any other. Rank 0 has as much as
any: of an uneven number of layers it gets one more.
"""

from dataclasses import dataclass
from typing import Any, Final

from hearth.shared.settings_from_env import Settings
from hearth.worker.ranks.loading.sharded_model import split_model
from hearth.worker.ranks.transport.rank_hosts import read_hosts
from hearth.worker.verdict.unloaded_model import parameter_bytes

LATENT_KV: Final = "kv_lora_rank"  # names what a model keeps for all of its heads, so that all do


@dataclass(frozen=True, slots=True)
class RankPart:
    """What rank 0 has of a whole: of its weights, of its KV, and of a forward's scores."""

    weights: float = 1.0
    kv: float = 1.0
    score_parts: int = 1


class ImaginedGroup:
    """Passes for MLX's group where a model is split: nothing is computed over it."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._ranks


def ranks_here(settings: Settings) -> int:
    """Return how many ranks of a model share this machine. Raises: StartError."""
    if settings.rank_hosts is None:
        return settings.ranks
    names = [host.name for host in read_hosts(settings.rank_hosts, settings.ranks)]
    return names.count(names[0])


def split_off(model: Any, config: dict[str, Any], settings: Settings) -> RankPart:
    """Split an unloaded model, and return what rank 0 has of it then.

    Raises:
        StartError: it cannot be split so.
        Exception: whatever an architecture can raise.
    """
    if settings.ranks == 1:
        return RankPart()
    nbytes, layers = parameter_bytes(model), len(model.layers)
    split_model(model, config, ImaginedGroup(settings.ranks), settings.rank_split)
    weights = parameter_bytes(model) / max(1, nbytes)
    if settings.rank_split == "pipeline":
        return RankPart(weights, len(model.layers) / layers)
    is_latent = LATENT_KV in (config.get("text_config") or config)
    return RankPart(weights, 1.0 if is_latent else 1 / settings.ranks, settings.ranks)
