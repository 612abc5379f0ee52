"""Chooses the dtype that a model computes in, and casts the weights to it.

The GPUs of M1 and M2 emulate bfloat16, and have float16 in hardware. MLX's CPU backend reads packed
(quantised) weights 17 times slower than dense float32, and weights of 16 bits slower still. In 16
bits, some kinds of layers give visibly different KV in decoding than in a prefill.
Owner: the inference thread.
"""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

_EMULATES: Final = re.compile(r"applegpu_g1[34]\D*")  # g13 is M1, g14 is M2; then e.g. "s" for Max
# Leaves that are not cast, for models without a rule of their own: decay rates of states, and
# biases of routers. Several architectures keep these in more bits.
_KEPT: Final = ("A_log", "e_score_correction_bias")
# The dtypes that are cast, by the dtype to compute in.
_CAST_FROM: Final = {
    "float32": (mx.bfloat16, mx.float16),
    "float16": (mx.bfloat16,),
    "bfloat16": (mx.float16,),
}
# Packed layers of mlx, mlx-lm and mlx-vlm that consist of a matrix (and a bias). Each has a dense
# class, named without "Quantized", in `nn` or in its own file. Other packed layers compute more.
_PACKED: Final = (
    *("QuantizedLinear", "QuantizedEmbedding"),
    *("QuantizedSwitchLinear", "QuantizedMultiLinear"),
)
_PACKED_PARTS: Final = ("weight", "scales", "biases", "global_scale")
# How recurrent layers compute their states. A key is upstream's name of the layer's class, or of a
# function that the layer's file imports. True means token by token: decoding and prefill give the
# same bits. False means a scan over chunks, counted from the forward's start (Mamba2). In bfloat16
# and 4 bits, the log probabilities of decoded and prefilled tokens differ by 0 for each True, and
# by 0.19 to 1.3 for each False.
RECURRENCES: Final = {
    "ssm_update": False,
    "gated_delta_update": True,  # Qwen3-Next, Qwen3.5, Olmo Hybrid, Kimi Linear
    "recurrent_gla": True,  # Bailing (Ring and Ling, linear)
    "MambaBlock": True,  # Mamba, Falcon Mamba
    "JambaMambaMixer": True,
    "RGLRU": True,  # RecurrentGemma
    "Rwkv7TimeMixing": True,
    "ShortConv": True,  # LFM2
}
# Multi-head latent attention has another formula for one token than for several: the order of its
# products with these weights differs. Log probabilities differ by 0.19 to 1.5, packed or not.
LATENT: Final = ("MultiLinear", "QuantizedMultiLinear")
# mlx-lm's models whose attention chooses tokens, in plain caches, and is not latent. The choice of
# others is told by their layer kinds.
CHOOSING: Final = ("minimax_m3_vl",)
_FLOAT32_BYTES: Final = 4
_GB: Final = 1024**3

IsCast = Callable[[str], bool]  # takes a leaf's dotted name


@dataclass(frozen=True, slots=True)
class ComputeDtype:
    """The dtype that a model computes in, and why."""

    name: str = ""  # dtype of most floats, e.g. "float16"
    is_cast: bool = False  # whether the checkpoint has another dtype
    reason: str = ""
    is_dense: bool = False  # whether packed layers are made dense

    @property
    def form(self) -> str:
        """The part of the KV's identity beyond the checkpoint.

        Packed weights sum in another order than dense ones.
        """
        return f"dense {self.name}" if self.is_dense else self.name

    def row(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "cast": self.is_cast,
            "dense": self.is_dense,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """The dtypes of a model's weights, and the bytes that they take or would take."""

    floats: Counter[str]  # number of elements by dtype
    is_packed: bool
    own_bytes: int  # with unchanged weights
    cast_bytes: int  # with all floats in float32
    dense_bytes: int  # with all floats and all packed layers in float32

    @property
    def dtype(self) -> str:
        """The dtype of most floats, e.g. "bfloat16"; "" without floats."""
        return self.floats.most_common(1)[0][0] if self.floats else ""

    def growth(self, dtype: ComputeDtype) -> int:
        """Return the bytes that a conversion to `dtype` adds. Casts within 16 bits add none."""
        if dtype.is_dense:
            return self.dense_bytes - self.own_bytes
        is_wider = dtype.is_cast and dtype.name == "float32"
        return self.cast_bytes - self.own_bytes if is_wider else 0


def weight_sizes_of(model: Any) -> WeightSizes:
    """Return the sizes of a model's weights. Nothing is evaluated."""
    floats: Counter[str] = Counter()
    own_bytes = cast_bytes = dense_bytes = 0
    for _, array in tree_flatten(model.parameters()):
        own_bytes += array.nbytes
        if mx.issubdtype(array.dtype, mx.floating):
            floats[str(array.dtype).rpartition(".")[2]] += array.size
            cast_bytes += array.size * _FLOAT32_BYTES
        else:
            cast_bytes += array.nbytes
    packed = [module for _, module in _packed_layers(model)]
    for module in packed:
        parts = [module[name] for name in _PACKED_PARTS if isinstance(module.get(name), mx.array)]
        own = [p.size * 4 if mx.issubdtype(p.dtype, mx.floating) else p.nbytes for p in parts]
        dense_bytes += module["weight"].size * 32 // module.bits * _FLOAT32_BYTES - sum(own)
    return WeightSizes(floats, bool(packed), own_bytes, cast_bytes, cast_bytes + dense_bytes)


def emulates_bfloat16(architecture: str) -> bool:
    """Whether a GPU has no bfloat16 in hardware, by its architecture in `mx.device_info()`."""
    return _EMULATES.fullmatch(architecture) is not None


def device_architecture() -> str:
    """Return the device's architecture, e.g. "applegpu_g13s" on an M1 Max."""
    return str(mx.device_info().get("architecture", ""))


def choose_dtype(
    setting: str,
    checkpoint: str,
    architecture: str,
    is_float16_good: bool | None,
    config_dtype: str = "",
) -> ComputeDtype:
    """Return the dtype to compute in, by `setting` (DTYPE) and the dtype of the checkpoint.

    `is_float16_good` is the result of this machine's checks of the model; None before the checks.
    `config_dtype` is the dtype that config.json names. With several ranks, `setting` is the dtype
    that rank 0 chose.
    """
    if setting == "float32":
        return ComputeDtype(setting, checkpoint != setting, "rank 0 computes so")
    if checkpoint == "float16" and config_dtype == "float32":  # float16 is only the storage
        name = "bfloat16" if setting == "bfloat16" else config_dtype
        return ComputeDtype(name, True, "config.json says float32, and float16 is how it is stored")
    if checkpoint != "bfloat16":
        return ComputeDtype(checkpoint, False, f"the weights are {checkpoint or 'no floats'}")
    if setting != "auto":
        return ComputeDtype(setting, setting == "float16", f"DTYPE is {setting}")
    if not emulates_bfloat16(architecture):
        return ComputeDtype(checkpoint, False, "this device computes bfloat16 itself")
    if is_float16_good is None:
        reason = "this device emulates bfloat16; whether float16 is as good is not checked yet"
        return ComputeDtype(checkpoint, False, f"{reason} (hearth doctor)")
    if not is_float16_good:
        return ComputeDtype(checkpoint, False, "float16 was checked and is not as good here")
    reason = "this device emulates bfloat16; float16 is as good here"
    return ComputeDtype("float16", True, reason)


def choose_on_cpu(sizes: WeightSizes, dense_bytes_max: int) -> ComputeDtype:
    """Return the dtype for the CPU backend where DTYPE is auto.

    `dense_bytes_max` is how many bytes a dense form may take.
    """
    is_cast = bool(sizes.floats.keys() - {"float32"})
    if not sizes.is_packed and not is_cast:
        return ComputeDtype("float32", False, "the weights are float32")
    if sizes.dense_bytes <= dense_bytes_max:
        reason = "a CPU computes dense float32 quickest"
        return ComputeDtype("float32", is_cast, reason, is_dense=sizes.is_packed)
    reason = (
        f"dense float32 would take {sizes.dense_bytes / _GB:.1f} GB, and half of the memory that "
        f"is free for a model is {dense_bytes_max / _GB:.1f} GB"
    )
    if sizes.is_packed:
        return ComputeDtype("float32", is_cast, reason)
    return ComputeDtype(sizes.dtype, False, reason)


def computed_in(dtype: ComputeDtype, before: WeightSizes, config: Mapping[str, Any]) -> str:
    """Return the compute dtype in a few words. `before` are the sizes in the checkpoint."""
    bits = (config.get("quantization") or {}).get("bits")
    packed = f"{bits} bits" if bits else "packed weights"
    if before.is_packed and not dtype.is_dense:
        return f"{packed}, {dtype.name}"
    if dtype.name != "float32" or not (dtype.is_dense or dtype.is_cast):
        return dtype.name
    made = packed if before.is_packed else before.dtype
    return f"{dtype.form}, made from {made}: {before.dense_bytes / 1e9:.1f} GB"


def dtype_of(model: Any) -> str:
    """Return the dtype of most floats of a model, e.g. "bfloat16"; "" without floats."""
    return weight_sizes_of(model).dtype


def make_dense(model: Any) -> None:
    """Replace the packed layers that have a dense class by float32 layers. Evaluates nothing."""
    dense = [(name, _dense_layer(module)) for name, module in _packed_layers(model)]
    if dense:
        model.update_modules(tree_unflatten(dense))


def _packed_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the packed layers that can be made dense, with their names."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        # Upstream's dequantising ignores a global scale, so such layers stay packed.
        if type(module).__name__ in _PACKED and module.get("global_scale") is None:
            yield name, module


def _dense_layer(packed: Any) -> nn.Module:
    kind = type(packed)
    name = kind.__name__.removeprefix("Quantized")
    dense_kind = getattr(nn, name, None) or getattr(sys.modules[kind.__module__], name)
    dense: nn.Module = dense_kind.__new__(dense_kind)
    nn.Module.__init__(dense)  # the layer's own __init__ would make random weights
    for name, part in packed.items():
        if name not in _PACKED_PARTS:
            dense[name] = part
    scales, biases = packed["scales"], packed.get("biases")
    if mx.issubdtype(scales.dtype, mx.floating):  # the result has the dtype of the scales
        scales = scales.astype(mx.float32)
    biases = None if biases is None else biases.astype(mx.float32)
    how = (packed.group_size, packed.bits, packed.mode)
    dense["weight"] = mx.dequantize(packed["weight"], scales, biases, *how).astype(mx.float32)
    return dense


def float_leaves(
    node: Any, is_cast: IsCast, kinds: tuple[mx.Dtype, ...] = (mx.bfloat16,), path: str = ""
) -> Iterator[tuple[Any, str | int, str]]:
    """Yield the holder, key and dotted name of each leaf of these `kinds` that may be cast.

    No reference to a leaf is kept meanwhile.
    """
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        name = f"{path}.{key}" if path else str(key)
        if str(key).startswith("_"):  # not a parameter, by MLX's rule
            continue
        if isinstance(value, mx.array):
            if value.dtype in kinds and is_cast(name):
                yield node, key, name
        elif isinstance(value, dict | list):
            yield from float_leaves(value, is_cast, kinds, name)


def cast_leaves(model: Any, name: str, is_cast: IsCast, *, evaluates: bool = True) -> None:
    """Cast the leaves of `model`, an MLX module, to the dtype `name`, one after another.

    The new leaf reuses the old one's buffer, or the buffer is freed, so that no two copies of the
    model are in memory.
    """
    uses: dict[int, list[tuple[Any, str | int]]] = {}  # by leaf: tied layers share a leaf
    for holder, key, _ in float_leaves(model, is_cast, _CAST_FROM[name]):
        uses.setdefault(id(holder[key]), []).append((holder, key))
    for (holder, key), *others in uses.values():
        for other_holder, other_key in others:
            other_holder[other_key] = None
        holder[key] = leaf = holder[key].astype(getattr(mx, name))  # the graph has the old leaf
        for other_holder, other_key in others:
            other_holder[other_key] = leaf
        if evaluates:
            mx.eval(leaf)


def compute_in(dtype: ComputeDtype, model: Any, *rules: Any, evaluates: bool = True) -> None:
    """Convert `model`, an MLX module, to `dtype`.

    `rules` are models that may say which leaves are cast: see `cast_rule`. Unless `evaluates`, the
    arrays stay lazy.
    """
    if dtype.is_dense:
        make_dense(model)
    if dtype.is_cast:
        # Casting to more bits does no harm, so all leaves are cast to float32.
        is_cast = cast_rule(model, *rules) if dtype.name != "float32" else lambda _name: True
        cast_leaves(model, dtype.name, is_cast, evaluates=evaluates)
    if dtype.is_dense and evaluates:
        for _, leaf in tree_flatten(model.parameters()):
            mx.eval(leaf)  # one by one, so that each layer's packed weights are freed at once
        mx.clear_cache()


def cast_rule(*models: Any) -> IsCast:
    """Return the rule for casting leaves, from the first of `models` that has one.

    Upstream's `cast_predicate` is a property or a method that returns a function, or is broken.
    """
    for model in models:
        try:
            predicate = getattr(model, "cast_predicate", None)
            rule: IsCast | None = predicate() if inspect.ismethod(predicate) else predicate
        except TypeError:  # a broken property of upstream's, which calls another property
            continue
        if rule is not None:
            return rule
    return lambda name: not any(kept in name for kept in _KEPT)


def differs_when_decoded(model: Any, keeps_states: bool) -> bool:
    """Whether KV that decoding wrote gives visibly other logits than a prefill's KV.

    The answer comes from the modules that upstream built, not from names in a config. In float32
    no model differs beyond rounding. `keeps_states` says that some layers keep recurrent states. A
    recurrence that is not in RECURRENCES counts as one that differs.
    """
    network = model if isinstance(model, nn.Module) else model.model  # VLMLanguageModel holds one
    modules = [module for _, module in network.named_modules()]
    kinds = {array.dtype for _, array in tree_flatten(model.parameters())}
    is_packed = any(hasattr(module, "bits") and hasattr(module, "group_size") for module in modules)
    if not is_packed and not kinds & {mx.float16, mx.bfloat16}:
        return False
    is_latent = any(type(module).__name__ in LATENT for module in modules)
    is_choosing = type(network).__module__.rpartition(".")[2] in CHOOSING
    # Code that came with a checkpoint has no entry in sys.modules.
    files = {type(module).__module__ for module in modules} & sys.modules.keys()
    names = {name for file in files for name in vars(sys.modules[file])}
    known = [RECURRENCES[name] for name in names & RECURRENCES.keys()]
    goes_token_by_token = bool(known) and all(known)
    return is_latent or is_choosing or (keeps_states and not goes_token_by_token)
