"""Holds what ten published models take at real size: weights, rows, states, windows.

The figures follow from the models' public configurations, with weights of 4 bits (4.5 with scales
and biases in groups of 64; gpt-oss in MXFP4) and KV of 2 bytes. States of linear layers are fp32.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

GB: Final = 1024**3
MB: Final = 1024**2
SHARES: Final = (8 / 9, 1 / 18, 1 / 18)  # of a quantised tensor: what its three arrays take
PROJECTIONS: Final = 7  # q, k, v, o, gate, up, down, each about as large


@dataclass(frozen=True, slots=True, eq=False)
class RealModel:
    """One model's proportions. Immutable."""

    name: str
    weight_bytes: int
    layers: int
    row_bytes: int  # of one token, all layers that keep every token
    heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    context: int  # tokens that the model was made for
    state_bytes: int = 0  # of one sequence, or one snapshot
    window: int = 0  # tokens that sliding layers look back
    window_row_bytes: int = 0  # of one token, all sliding layers
    kept_layers: int = 0  # that keep every token; 0 = all
    more: Mapping[str, int | str] = field(default_factory=dict)  # of its configuration

    @property
    def config(self) -> dict[str, int | str]:
        """What of the model's config.json tells how much a forward takes."""
        sizes = {
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "head_dim": self.head_dim,
        }
        return sizes | dict(self.more)

    @property
    def attention_layers(self) -> int:
        return self.kept_layers or self.layers

    def slot_bytes(self, tokens: int) -> int:
        """Return what one sequence of so many tokens takes."""
        window = min(tokens, self.window) * self.window_row_bytes
        return tokens * self.row_bytes + window + self.state_bytes

    def weights(self) -> Iterator[int]:
        """Yield the bytes of the weights' arrays as they are loaded, the embeddings first."""
        table = int(self.vocabulary * self.hidden * 4.5 / 8)
        yield from _quantised(table)
        projection = (self.weight_bytes - table) // self.layers // PROJECTIONS
        for _ in range(self.layers):
            for _ in range(PROJECTIONS):
                yield from _quantised(projection)
            yield self.hidden * 2  # norms
            yield self.hidden * 2
            yield self.head_dim * 2

    def extent(self, tokens: int) -> Iterator[int]:
        """Yield the bytes of the arrays that are kept of a run of tokens."""
        for _ in range(self.attention_layers):
            for _ in ("keys", "values"):
                yield tokens * self.row_bytes // self.attention_layers // 2

    def snapshot(self) -> Iterator[int]:
        """Yield the bytes of the arrays of one state."""
        linear = self.layers - self.attention_layers
        if self.state_bytes:
            for _ in range(linear):
                yield self.state_bytes * 97 // 100 // linear  # what is multiplied
                yield self.state_bytes * 3 // 100 // linear  # the convolution's last inputs


def _quantised(nbytes: int) -> Iterator[int]:
    yield from (int(nbytes * share) for share in SHARES)


MODELS: Final = (
    RealModel(
        *("Qwen3-4B", int(2.26e9), 36, 36 * 2 * 8 * 128 * 2),
        *(32, 128, 2560, 151_936, 262_144),
        more={"intermediate_size": 9_728},
    ),
    RealModel(
        *("Qwen3-30B-A3B", int(17.2e9), 48, 48 * 2 * 4 * 128 * 2),
        *(32, 128, 2048, 151_936, 262_144),
        more={"moe_intermediate_size": 768, "num_experts_per_tok": 8},
    ),
    RealModel(
        *("Qwen3-32B", int(18.4e9), 64, 64 * 2 * 8 * 128 * 2),
        *(64, 128, 5120, 151_936, 40_960),
        more={"intermediate_size": 25_600},
    ),
    RealModel(
        *("Qwen3.5-27B", int(15.6e9), 64, 16 * 2 * 4 * 256 * 2),
        *(24, 256, 5120, 248_320, 262_144),
        state_bytes=147 * MB,
        kept_layers=16,
        more={"intermediate_size": 17_408, "linear_num_value_heads": 48},
    ),
    RealModel(
        *("Qwen3.5-35B-A3B", int(19.7e9), 40, 10 * 2 * 2 * 256 * 2),
        *(16, 256, 2048, 248_320, 262_144),
        state_bytes=61 * MB,
        kept_layers=10,
        more={
            "moe_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "shared_expert_intermediate_size": 512,
            "linear_num_value_heads": 32,
        },
    ),
    RealModel(
        *("Gemma-3-27B", int(15.4e9), 62, 10 * 2 * 16 * 128 * 2),
        *(32, 128, 5376, 262_208, 131_072),
        window=1024,
        window_row_bytes=52 * 2 * 16 * 128 * 2,
        kept_layers=10,
        more={"intermediate_size": 21_504},
    ),
    RealModel(
        *("gpt-oss-20b", int(12.1e9), 24, 12 * 2 * 8 * 64 * 2),
        *(64, 64, 2880, 201_088, 131_072),
        window=128,
        window_row_bytes=12 * 2 * 8 * 64 * 2,
        kept_layers=12,
        more={"model_type": "gpt_oss", "intermediate_size": 2_880, "num_experts_per_tok": 4},
    ),
    RealModel(
        *("gpt-oss-120b", int(63.4e9), 36, 18 * 2 * 8 * 64 * 2),
        *(64, 64, 2880, 201_088, 131_072),
        window=128,
        window_row_bytes=18 * 2 * 8 * 64 * 2,
        kept_layers=18,
        more={"model_type": "gpt_oss", "intermediate_size": 2_880, "num_experts_per_tok": 4},
    ),
    RealModel(
        *("GLM-4.7-Flash", int(16.8e9), 47, 47 * (512 + 64) * 2),
        *(20, 256, 2048, 154_880, 202_752),
        more={
            "moe_intermediate_size": 1_536,
            "num_experts_per_tok": 4,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
        },
    ),
    RealModel(
        *("Llama-3.3-70B", int(39.7e9), 80, 80 * 2 * 8 * 128 * 2),
        *(64, 128, 8192, 128_256, 131_072),
        more={"intermediate_size": 28_672},
    ),
)
