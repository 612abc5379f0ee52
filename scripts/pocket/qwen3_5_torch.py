"""Holds the tiny Qwen3.5 text model in PyTorch, to train on a CPU weights that mlx_lm serves.

Gated delta nets with full attention every `full_attention_interval` layers, as in mlx_lm's
qwen3_5.py. A CPU multiplies matrices in bfloat16 far faster than it does anything else, so what
lies between the matmuls is written by hand as autograd functions that touch each array as seldom
as they can. Data, loss, optimiser and files stay out.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "full_attention_interval": 3,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
        "mrope_section": [4, 2, 2],
    },
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}

CHUNK_TOKENS: Final = 64  # the delta rule is a matmul within a chunk and a loop over chunks
CONV_BLOCK_TOKENS: Final = 128
L2_EPS: Final = 1e-6
LOG_DECAY_MIN: Final = -60.0  # where float32 is far from denormals, which are slow
STEP_MIN: Final = 1e-3
STEP_MAX: Final = 1e-1


class _Unit(Function):
    """Scales the last dimension of x to a root mean square of `scale`."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).float()
        inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_().mul_(scale)
        inverse = inverse.to(x.dtype)
        y = torch.mul(x, inverse, out=torch.empty(x.shape, dtype=x.dtype))
        ctx.save_for_backward(y, inverse)
        ctx.scale = scale
        return y

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, inverse = ctx.saved_tensors
        along = torch.linalg.vecdot(dy, y).unsqueeze(-1).mul_(-1 / (y.shape[-1] * ctx.scale**2))
        return torch.addcmul(dy, y, along).mul_(inverse), None, None


class _CausalConv(Function):
    """Convolves each channel with its own kernel over the tokens up to the present one."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, kernel: Tensor) -> Tensor:
        """x (batch, tokens, channels), kernel (channels, taps), both of one dtype."""
        ctx.save_for_backward(x, kernel)
        return _CausalConv.convolve(x, kernel)[:, : x.shape[1]]

    @staticmethod
    def convolve(x: Tensor, kernel: Tensor) -> Tensor:
        """Return (batch, tokens + taps - 1, channels), with zeros before and after the tokens."""
        # oneDNN is fast on a 2-D convolution whose channels come last, as they do here already.
        image = x.transpose(1, 2).unsqueeze(2)
        taps = kernel[:, None, None]
        padding = (0, kernel.shape[1] - 1)
        image = F.conv2d(image, taps, groups=kernel.shape[0], padding=padding)
        return image.squeeze(2).transpose(1, 2)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, kernel = ctx.saved_tensors
        taps, tokens = kernel.shape[1], x.shape[1]
        dy = dy.contiguous()
        dx = _CausalConv.convolve(dy, kernel.flip(1))[:, taps - 1 :]
        windows = F.pad(x, (0, 0, taps - 1, 0)).unfold(1, taps, 1).transpose(2, 3)
        dkernel = torch.zeros(taps, kernel.shape[0])
        for row, window in zip(dy, windows, strict=True):
            for at in range(0, tokens, CONV_BLOCK_TOKENS):
                part = slice(at, at + CONV_BLOCK_TOKENS)
                dkernel += (row[part, None] * window[part]).sum(0)
        return dx, dkernel.t().to(kernel.dtype)


class _DeltaRule(Function):
    """S = a S + b k (v - (a S)^T k)^T and y = S^T q for each token, a chunk of tokens at a time.

    Source: Yang et al., Gated Delta Networks (2024), section 3.3. The state that a chunk leaves
    is a matrix of its own times the state it finds, plus another: only that is a loop.
    """

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, log_beta: Tensor
    ) -> Tensor:
        """q, k, v (chunks, rows, CHUNK_TOKENS, dim), a row being a head of a sequence.

        log_decay and log_beta (chunks, rows, CHUNK_TOKENS, 1) float32 -> as v.
        """
        chunks, dtype, dim = q.shape[0], q.dtype, v.shape[-1]
        q, k, v, past, log_beta = (x.flatten(0, 1) for x in (q, k, v, log_decay, log_beta))
        past = past.cumsum(1)
        gates = log_beta, past, past[:, -1:] - past
        beta, since, until = (x.clamp(min=LOG_DECAY_MIN).exp().to(dtype) for x in gates)
        whole = past[:, -1].clamp(min=LOG_DECAY_MIN).exp()  # float32: its error would add up
        decay = (past - past.mT).clamp_(LOG_DECAY_MIN, 0).exp_().to(dtype).tril_()
        beta_k, k_end, q_start = k * beta, k * until, q * since
        right = torch.cat([v * beta, beta_k * -since], -1)
        coupling = (torch.bmm(beta_k, k.mT) * decay).float()
        one = torch.eye(CHUNK_TOKENS).expand_as(coupling)
        # Transposed both ways, since LAPACK's columns are our rows.
        solve = torch.linalg.solve_triangular(coupling.mT, one, upper=True, unitriangular=True)
        solve = solve.mT.to(dtype)
        scores = torch.bmm(q, k.mT) * decay
        solved = torch.bmm(solve, right)

        carried = torch.bmm(k_end.mT, solved).float()
        carried[..., dim:].diagonal(dim1=1, dim2=2).add_(whole)
        carried = carried.unflatten(0, (chunks, -1))
        states = torch.empty(carried[..., :dim].shape)
        states[0] = 0
        for now, after, moved in zip(states, states[1:], carried, strict=False):
            torch.baddbmm(moved[..., :dim], moved[..., dim:], now, out=after)
        state = states.flatten(0, 1).to(dtype)
        update = torch.baddbmm(solved[..., :dim], solved[..., dim:], state)
        y = torch.bmm(scores, update).baddbmm_(q_start, state)
        ctx.save_for_backward(
            *(q, k, beta_k, q_start, k_end, right, decay, scores, solve, solved),
            *(update, carried, state, beta, since, until, whole),
        )
        return y.unflatten(0, (chunks, -1))

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        q, k, beta_k, q_start, k_end, right, decay, scores, solve, solved, *rest = ctx.saved_tensors
        update, carried, state, beta, since, until, whole = rest
        chunks, dim = carried.shape[0], dy.shape[-1]
        dy = dy.flatten(0, 1)
        dupdate = torch.bmm(scores.mT, dy)
        dstate = torch.bmm(q_start.mT, dy).baddbmm_(solved[..., dim:].mT, dupdate)
        dstates = dstate.float().unflatten(0, (chunks, -1))
        dnexts = torch.empty_like(dstates)  # of the states after the chunks
        dnexts[-1] = 0
        for n in range(chunks - 1, 0, -1):
            torch.baddbmm(dstates[n], carried[n, ..., dim:].mT, dnexts[n], out=dnexts[n - 1])
        dnext = dnexts.flatten(0, 1).to(dy.dtype)

        dupdate.baddbmm_(k_end, dnext)
        dsolved = torch.cat([dupdate, torch.bmm(dupdate, state.mT)], -1)
        dright = torch.bmm(solve.mT, dsolved)
        dcoupling = (torch.bmm(dright, solved.mT) * decay).tril_(-1).neg_()
        dscores = torch.bmm(dy, update.mT) * decay
        dq = torch.bmm(dy, state.mT).mul_(since).baddbmm_(dscores, k)
        dbeta_k = (dright[..., dim:] * -since).baddbmm_(dcoupling, k)
        dk = torch.bmm(update, dnext.mT).mul_(until)
        # A factor e^x of an array a has the gradient a da, whatever else a goes into.
        end = _dots(dk, k).sum(1) + whole * _dots(dnext, state).sum(1)
        dk.baddbmm_(dcoupling.mT, beta_k).baddbmm_(dscores.mT, q)
        left = _dots(dbeta_k, beta_k)
        dlog_beta = left + _dots(dright[..., :dim], right[..., :dim])
        dpast = left + _dots(dq, q) - _dots(dk, k)
        dpast[:, -1] += end
        dlog_decay = dpast.flip(1).cumsum(1).flip(1)
        dk.addcmul_(dbeta_k, beta)
        dv = dright[..., :dim] * beta
        return tuple(x.unflatten(0, (chunks, -1)) for x in (dq, dk, dv, dlog_decay, dlog_beta))


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """(rows, tokens, dim) twice -> (rows, tokens, 1) float32."""
    return torch.linalg.vecdot(a, b).unsqueeze(-1).float()


def _plain(function: type[Function], *arguments: Any) -> Tensor:
    """Apply `function`, which picks its own dtypes, out of autocast's reach."""
    with torch.autocast("cpu", enabled=False):
        return function.apply(*arguments)


def _linear(*sizes: int) -> nn.Linear:
    return nn.Linear(*sizes, bias=False)


def _scaled(x: Tensor, norm: nn.RMSNorm, *layers: nn.Linear) -> Tensor:
    """Return the layers of x times the weight of `norm`, one beside the other.

    The weight goes into the matrices, which are small.
    """
    return F.linear(x, torch.cat([layer.weight for layer in layers]) * norm.weight)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, log_beta: Tensor) -> Tensor:
    """Run the gated delta rule over whole sequences from an empty state.

    q, k (batch, tokens, k_heads, dim), v (batch, tokens, v_heads, dim of its own); log_decay and
    log_beta (batch, tokens, v_heads) float32 -> as v.
    """
    batch, tokens, heads, _ = v.shape
    spare = -tokens % CHUNK_TOKENS

    def chunked(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, 0, 0, spare)) if spare else x
        return x.unflatten(1, (-1, CHUNK_TOKENS)).permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()

    q, k = (
        x.repeat_interleave(heads // x.shape[2], 2) if x.shape[2] < heads else x for x in (q, k)
    )
    gates = log_decay.unsqueeze(-1), log_beta.unsqueeze(-1)
    y = _plain(_DeltaRule, *(chunked(x) for x in (q, k, v, *gates)))
    y = y.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4)
    return y.flatten(1, 2)[:, :tokens]


class DeltaNet(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.k_dim, self.v_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        v_heads = config["linear_num_value_heads"]
        self.k_size = config["linear_num_key_heads"] * self.k_dim
        self.v_size = v_heads * self.v_dim
        size = 2 * self.k_size + self.v_size
        self.in_proj_qkv = _linear(hidden, size)
        self.in_proj_z = _linear(hidden, self.v_size)
        self.in_proj_b = _linear(hidden, v_heads)
        self.in_proj_a = _linear(hidden, v_heads)
        taps = config["linear_conv_kernel_dim"]
        self.conv1d = nn.Conv1d(size, size, taps, groups=size, bias=False)
        self.norm = nn.RMSNorm(self.v_dim, eps=eps)
        self.out_proj = _linear(self.v_size, hidden)
        self.A_log = nn.Parameter(torch.empty(v_heads).uniform_(0, 16).log_())
        # The steps of the paper's code, not the ones of transformers: those forget at once.
        step = torch.empty(v_heads).uniform_(math.log(STEP_MIN), math.log(STEP_MAX))
        self.dt_bias = nn.Parameter(step.exp().expm1().log())

    def forward(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """x (batch, tokens, hidden_size) normed but for the weight of `norm` -> the same shape."""
        qkv, z = _scaled(x, norm, self.in_proj_qkv), _scaled(x, norm, self.in_proj_z)
        b, a = _scaled(x, norm, self.in_proj_b, self.in_proj_a).float().chunk(2, -1)
        qkv = F.silu(_plain(_CausalConv, qkv, self.conv1d.weight[:, 0].to(qkv.dtype)))
        q, k, v = qkv.split([self.k_size, self.k_size, self.v_size], -1)
        q, k = (t.unflatten(-1, (-1, self.k_dim)) for t in (q, k))
        eps, length = L2_EPS / self.k_dim, self.k_dim**-0.5
        q, k = _plain(_Unit, q, eps, length**2), _plain(_Unit, k, eps, length)
        v = v.unflatten(-1, (-1, self.v_dim))
        log_decay = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        y = _plain(_Unit, delta_rule(q, k, v, log_decay, F.logsigmoid(b)), self.norm.eps)
        matrix = self.out_proj.weight * self.norm.weight.repeat(self.v_size // self.v_dim)
        return F.linear(y.flatten(2) * F.silu(z), matrix)


class Attention(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.dim, self.heads = config["head_dim"], config["num_attention_heads"]
        kv_size = config["num_key_value_heads"] * self.dim
        self.q_proj = _linear(hidden, 2 * self.heads * self.dim)
        self.k_proj = _linear(hidden, kv_size)
        self.v_proj = _linear(hidden, kv_size)
        self.o_proj = _linear(self.heads * self.dim, hidden)
        self.q_norm = nn.RMSNorm(self.dim, eps=eps)
        self.k_norm = nn.RMSNorm(self.dim, eps=eps)
        rope = config["rope_parameters"]
        self.rotated = int(self.dim * rope["partial_rotary_factor"])
        self.rope_theta = rope["rope_theta"]

    def forward(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """x (batch, tokens, hidden_size) normed but for the weight of `norm` -> the same shape."""
        q, k, v = (_scaled(x, norm, layer) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, gate = q.unflatten(-1, (self.heads, -1)).chunk(2, -1)
        k, v = (t.unflatten(-1, (-1, self.dim)).transpose(1, 2) for t in (k, v))
        q = self.turn(q.transpose(1, 2), self.q_norm)
        k = self.turn(k, self.k_norm)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        return self.o_proj((y * gate.sigmoid()).flatten(2))

    def turn(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """Return x (batch, heads, tokens, head_dim) normed, its first dims turned by position."""
        x = _plain(_Unit, x, norm.eps) * norm.weight.to(x.dtype)
        half = self.rotated // 2
        speeds = self.rope_theta ** (torch.arange(half) / -half)
        angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float32), speeds)
        cos, sin = angles.cos(), angles.sin()
        first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
        turned = first * cos - second * sin, second * cos + first * sin
        return torch.cat([*(t.to(x.dtype) for t in turned), rest], -1)


class Mlp(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = _linear(hidden, inner)
        self.up_proj = _linear(hidden, inner)
        self.down_proj = _linear(inner, hidden)

    def forward(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """x (batch, tokens, hidden_size) normed but for the weight of `norm` -> the same shape."""
        gate, up = _scaled(x, norm, self.gate_proj), _scaled(x, norm, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any], index: int) -> None:
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.is_linear = (index + 1) % config["full_attention_interval"] != 0
        if self.is_linear:
            self.linear_attn = DeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        mixer = self.linear_attn if self.is_linear else self.self_attn
        for part, norm in (
            (mixer, self.input_layernorm),
            (self.mlp, self.post_attention_layernorm),
        ):
            x = x + part(_plain(_Unit, x, norm.eps), norm)
        return x


class Hybrid(nn.Module):
    """The model; its parameters have mlx_lm's names, less the prefix."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], size)
        self.layers = nn.ModuleList(
            Layer(config, index) for index in range(config["num_hidden_layers"])
        )
        self.norm = nn.RMSNorm(size, eps=config["rms_norm_eps"])
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_residual = name.endswith(
                    ("out_proj.weight", "o_proj.weight", "down_proj.weight")
                )
                depth = 2 * len(self.layers) if is_residual else 1
                nn.init.normal_(parameter, std=0.02 * depth**-0.5)

    def hidden(self, ids: Tensor) -> Tensor:
        """(batch, tokens) int64 -> (batch, tokens, hidden_size), after the final norm."""
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        for layer in self.layers:
            x = layer(x)
        return _plain(_Unit, x, self.norm.eps) * self.norm.weight.to(x.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) -> (..., vocab_size): the head is the embedding."""
        return F.linear(hidden, self.embed_tokens.weight)

    def weights(self) -> dict[str, Tensor]:
        """Return what model.safetensors holds, in MLX's own form.

        mlx_lm's `sanitize` adds one to the norms and turns the convolutions of a file in which it
        finds a convolution with its taps last; with the taps in the middle it leaves both alone.
        """
        return {
            f"language_model.model.{name}": (
                tensor.transpose(1, 2) if name.endswith("conv1d.weight") else tensor
            ).contiguous()
            for name, tensor in self.state_dict().items()
        }
