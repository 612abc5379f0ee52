"""Holds what published models that embed and rank take, and makes directories that say so.

The figures follow from the models' public configurations, with weights of 8 bits (8.5 with scales
and biases in groups of 64), or of 16.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class RealEncoder:
    """One model's proportions. Immutable."""

    name: str
    weight_bytes: int
    config: Mapping[str, Any]

    def written(self, folder: Path) -> Path:
        """Return a directory in `folder` that has its config, and a file as long as its weights.

        The file is a hole, which takes no room on the disk.
        """
        directory = folder / self.name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(dict(self.config)))
        with (directory / "model.safetensors").open("wb") as file:
            file.truncate(self.weight_bytes)
        return directory


def _qwen3(name: str, weight_bytes: float, hidden: int, inner: int, heads: int) -> RealEncoder:
    return RealEncoder(
        name,
        int(weight_bytes),
        {
            "model_type": "qwen3",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "quantization": {"bits": 8, "group_size": 64},
        },
    )


EMBEDDER: Final = _qwen3("Qwen3-Embedding-0.6B", 0.63e9, 1_024, 3_072, 16)
LARGE_EMBEDDER: Final = _qwen3("Qwen3-Embedding-4B", 4.27e9, 2_560, 9_728, 32)
RANKER: Final = _qwen3("Qwen3-Reranker-0.6B", 0.63e9, 1_024, 3_072, 16)
