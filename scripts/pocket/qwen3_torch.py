"""Holds the Qwen3 architecture in PyTorch, to train weights that mlx_lm's qwen3 loads."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": 3_072,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}


class Norm(nn.Module):
    """Root mean square normalisation with a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self._eps)


def rotations(length: int, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (length, width) of rotary positions, halves repeated."""
    steps = theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * steps
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def rotated(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turn x (B, heads, T, width) by its positions."""
    cosines, sines = (part.to(x.dtype) for part in turns)
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, head = config["hidden_size"], config["head_dim"]
        self._heads, self._groups = config["num_attention_heads"], config["num_key_value_heads"]
        self._head = head
        self.q_proj = nn.Linear(width, self._heads * head, bias=False)
        self.k_proj = nn.Linear(width, self._groups * head, bias=False)
        self.v_proj = nn.Linear(width, self._groups * head, bias=False)
        self.o_proj = nn.Linear(self._heads * head, width, bias=False)
        self.q_norm = Norm(head, config["rms_norm_eps"])
        self.k_norm = Norm(head, config["rms_norm_eps"])

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        rows, length, _ = x.shape

        def split(part: Tensor) -> Tensor:
            return part.view(rows, length, -1, self._head)

        queries = rotated(self.q_norm(split(self.q_proj(x))).transpose(1, 2), turns)
        keys = rotated(self.k_norm(split(self.k_proj(x))).transpose(1, 2), turns)
        values = split(self.v_proj(x)).transpose(1, 2)
        repeats = self._heads // self._groups
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(repeats, dim=1),
            values.repeat_interleave(repeats, dim=1),
            is_causal=True,
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = Norm(width, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(width, eps)
        self.mlp = Mlp(width, config["intermediate_size"])

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turns)
        return x + self.mlp(self.post_attention_layernorm(x))


class Dense(nn.Module):
    """A Qwen3 text model; `hidden` and `logits` are apart, since most positions need no logits."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._config = config
        body = nn.Module()
        body.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        body.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        body.norm = Norm(config["hidden_size"], config["rms_norm_eps"])
        self.model = body
        residual = 0.02 / (2 * config["num_hidden_layers"]) ** 0.5
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=residual if is_output else 0.02)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the states (B, T, width) behind the last norm for ids (B, T)."""
        turns = rotations(ids.shape[1], self._config["head_dim"], self._config["rope_theta"])
        x = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.bfloat16)
        for layer in self.model.layers:
            x = layer(x, turns)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., vocabulary) of states (..., width)."""
        return functional.linear(hidden, self.model.embed_tokens.weight)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by the names that mlx_lm looks for."""
        return {name: weight.detach() for name, weight in self.state_dict().items()}
