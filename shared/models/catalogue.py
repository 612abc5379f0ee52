"""Lists models that are recommended, by the machine's memory and by purpose, with their aliases.

The sizes were looked up, not measured: each is the sum of the `.safetensors` files that the hub
lists for the repository, in 10**9 bytes. What could not be looked up is not here. None of these
models was run by us.
"""

from dataclasses import dataclass
from typing import Final

LOOKED_UP: Final = "2026-11-25"
# Source of the sizes: a public catalogue of MLX models (in the index of GitHub that was searched,
# file 71282272125) whose author summed the hub's directory listings on 2026-08-24. A second one
# (file 57975103893) has the same figure for GLM-4.7-Flash, pages of others for Qwen3.6-35B-A3B.
SOURCE: Final = "the hub's file listings of 2026-08-24, as a public catalogue sums them"


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """One recommended model. Immutable."""

    alias: str  # what `hearth pull` and MODEL_PATH take for it
    hub_id: str
    download_gb: float  # weights, in 10**9 bytes
    memory_gb: int  # of the smallest Mac that has room for it and 32,768 tokens
    purpose: str
    takes: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        return round(self.download_gb * 10**9)


_SEES: Final = ("images", "tools", "thinking")
_THINKS: Final = ("tools", "thinking")

CATALOGUE: Final = (
    CatalogueModel(
        *("qwen3.5-2b", "mlx-community/Qwen3.5-2B-MLX-4bit", 1.7, 8),
        *("a first try, short tasks", _SEES),
    ),
    CatalogueModel(
        *("qwen3.5-4b", "mlx-community/Qwen3.5-4B-MLX-4bit", 3.1, 16),
        *("chat, small tool loops", _SEES),
    ),
    CatalogueModel(
        *("qwen3.5-9b", "mlx-community/Qwen3.5-9B-MLX-4bit", 6.0, 16),
        *("an agent on a small machine", _SEES),
    ),
    CatalogueModel(
        *("gpt-oss-20b", "mlx-community/gpt-oss-20b-MXFP4-Q8", 12.1, 24),
        *("a fast agent, long contexts", _THINKS),
    ),
    CatalogueModel(
        *("qwen3.8-27b", "mlx-community/Qwen3.8-27B-4bit", 16.1, 32),
        *("a thorough agent, slower", _SEES),
    ),
    CatalogueModel(
        *("glm-4.7-flash", "mlx-community/GLM-4.7-Flash-4bit", 16.9, 32),
        *("a fast agent, code", _THINKS),
    ),
    CatalogueModel(
        *("qwen3.6-35b", "mlx-community/Qwen3.6-35B-A3B-4bit", 20.4, 36),
        *("a fast agent, 3 B active", _SEES),
    ),
    CatalogueModel(
        *("gpt-oss-120b", "mlx-community/gpt-oss-120b-MXFP4-Q8", 63.4, 96),
        *("an agent on a large machine", _THINKS),
    ),
    CatalogueModel(
        *("qwen3.5-122b", "mlx-community/Qwen3.5-122B-A10B-4bit", 69.6, 128),
        *("the largest here, 10 B active", _SEES),
    ),
)


def catalogued(name: str) -> CatalogueModel | None:
    """Return the model that `name`, an alias or a hub id in any case, stands for."""
    wanted = name.lower().removesuffix(":latest")
    found = (each for each in CATALOGUE if wanted in (each.alias, each.hub_id.lower()))
    return next(found, None)


def fitting(machine_bytes: int) -> list[CatalogueModel]:
    """Return the models for a machine of so much memory, the largest first."""
    memory_gb = machine_bytes / 1024**3
    return [model for model in reversed(CATALOGUE) if model.memory_gb <= memory_gb + 1]


def recommended(machine_bytes: int) -> CatalogueModel | None:
    """Return the one model to name on a machine of so much memory: an agent's, where one fits."""
    models = fitting(machine_bytes)
    agents = [model for model in models if "agent" in model.purpose]
    return next(iter(agents or models), None)
