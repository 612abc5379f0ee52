"""Chooses what a checkpoint's numbers are computed in, and makes them so.

The GPUs of M1 and M2 emulate bfloat16, and compute float16 themselves. MLX's CPU backend reads
packed (quantised) weights 17 times slower than dense float32, and all of 16 bits slower still.
In coarse numbers KV that decoding wrote visibly differs from a prefill's, by a model's layers.
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

_EMULATES: Final = re.compile(r"applegpu_g1[34]\D*")  # g13 is M1, g14 is M2; then the size, as "s"
# Where a model does not say which of its leaves are not to be cast: decay rates of states, and
# biases of routers, which several architectures keep in more bits.
_KEPT: Final = ("A_log", "e_score_correction_bias")
# By what is computed in: the floats that are cast to it.
_CAST_FROM: Final = {
    "float32": (mx.bfloat16, mx.float16),
    "float16": (mx.bfloat16,),
    "bfloat16": (mx.float16,),
}
# The packed layers that are a matrix (and a bias), of mlx, mlx-lm and mlx-vlm: `nn` or their file
# has a dense form of the name without "Quantized". What others add to that, only they compute.
_PACKED: Final = (
    *("QuantizedLinear", "QuantizedEmbedding"),
    *("QuantizedSwitchLinear", "QuantizedMultiLinear"),
)
_PACKED_PARTS: Final = ("weight", "scales", "biases", "global_scale")
# Upstream's names for what a state-keeping layer computes its states by: a function that its file
# imports, or its own class. True: one token at a time, so that decoding leaves a prefill's bits.
# False: a scan in chunks counted from the forward's start (Mamba2). Log probabilities of bfloat16
# and 4 bits, decoded and prefilled: 0 for each True, 0.19 to 1.3 for each False.
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
# Multi-head latent attention has another formula for one token than for many: its products with
# weights of these kinds change places. 0.19 to 1.5, packed or not.
LATENT: Final = ("MultiLinear", "QuantizedMultiLinear")
_FLOAT32_BYTES: Final = 4
_GB: Final = 1024**3

IsCast = Callable[[str], bool]  # takes a leaf's dotted name


@dataclass(frozen=True, slots=True)
class ComputeDtype:
    """What a model's numbers are computed in, and why."""

    name: str = ""  # of most of them, e.g. "float16"
    is_cast: bool = False  # from what they are in the checkpoint
    reason: str = ""
    is_dense: bool = False  # packed layers are made dense

    @property
    def form(self) -> str:
        """What KV depends on beyond the checkpoint: products with codes sum in another order."""
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
    """What a model's weights are, evaluated or not, and the bytes that they would take."""

    floats: Counter[str]  # elements by dtype
    is_packed: bool
    own_bytes: int  # as they are
    cast_bytes: int  # with all floats in float32
    dense_bytes: int  # with all in float32 that can be

    @property
    def dtype(self) -> str:
        """The dtype of most floats, e.g. "bfloat16"; "" where there are none."""
        return self.floats.most_common(1)[0][0] if self.floats else ""

    def growth(self, dtype: ComputeDtype) -> int:
        """Return the bytes that making them so adds; other casts add none."""
        if dtype.is_dense:
            return self.dense_bytes - self.own_bytes
        is_wider = dtype.is_cast and dtype.name == "float32"
        return self.cast_bytes - self.own_bytes if is_wider else 0


def weight_sizes_of(model: Any) -> WeightSizes:
    """Return the sizes of `model`, which has `parameters`; nothing is evaluated."""
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
    """Whether a GPU, as `mx.device_info()` names its architecture, has no bfloat16 of its own."""
    return _EMULATES.fullmatch(architecture) is not None


def device_architecture() -> str:
    """Return what the device calls its architecture, e.g. "applegpu_g13s" on an M1 Max."""
    return str(mx.device_info().get("architecture", ""))


def choose_dtype(
    setting: str,
    checkpoint: str,
    architecture: str,
    is_float16_good: bool | None,
    told: str = "",
) -> ComputeDtype:
    """Return what to compute in where DTYPE is `setting` and the checkpoint's numbers are given.

    `is_float16_good` is what the checks of this model found on this machine, None before they ran.
    `told` is the dtype that config.json names. Of several ranks, `setting` is what rank 0 chose.
    """
    if setting == "float32":
        return ComputeDtype(setting, checkpoint != setting, "rank 0 computes so")
    if checkpoint == "float16" and told == "float32":  # stored so, and nonsense computed so
        name = "bfloat16" if setting == "bfloat16" else told
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
    """Return what the CPU backend computes such weights in where DTYPE is auto.

    `dense_bytes_max` is what a dense form may take.
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
    """Return in a few words what is computed in; `before` are the sizes of the checkpoint."""
    bits = (config.get("quantization") or {}).get("bits")
    packed = f"{bits} bits" if bits else "packed weights"
    if before.is_packed and not dtype.is_dense:
        return f"{packed}, {dtype.name}"
    if dtype.name != "float32" or not (dtype.is_dense or dtype.is_cast):
        return dtype.name
    made = packed if before.is_packed else before.dtype
    return f"{dtype.form}, made from {made}: {before.dense_bytes / 1e9:.1f} GB"


def dtype_of(model: Any) -> str:
    """Return the dtype of most floats of a model, e.g. "bfloat16"; "" where it has none."""
    return weight_sizes_of(model).dtype


def make_dense(model: Any) -> None:
    """Replace the packed layers of `model` that have a dense form in float32. Evaluates nothing."""
    dense = [(name, _dense_layer(module)) for name, module in _packed_layers(model)]
    if dense:
        model.update_modules(tree_unflatten(dense))


def _packed_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the packed layers that can be made dense, with their names."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        # What has a global scale is packed twice; upstream's dequantising forgets it.
        if type(module).__name__ in _PACKED and module.get("global_scale") is None:
            yield name, module


def _dense_layer(packed: Any) -> nn.Module:
    kind = type(packed)
    name = kind.__name__.removeprefix("Quantized")
    dense_kind = getattr(nn, name, None) or getattr(sys.modules[kind.__module__], name)
    dense: nn.Module = dense_kind.__new__(dense_kind)
    nn.Module.__init__(dense)  # its own would make random weights
    for name, part in packed.items():
        if name not in _PACKED_PARTS:
            dense[name] = part
    scales, biases = packed["scales"], packed.get("biases")
    if mx.issubdtype(scales.dtype, mx.floating):  # what is unpacked has the type of its scales
        scales = scales.astype(mx.float32)
    biases = None if biases is None else biases.astype(mx.float32)
    how = (packed.group_size, packed.bits, packed.mode)
    dense["weight"] = mx.dequantize(packed["weight"], scales, biases, *how).astype(mx.float32)
    return dense


def float_places(
    node: Any, is_cast: IsCast, kinds: tuple[mx.Dtype, ...] = (mx.bfloat16,), path: str = ""
) -> Iterator[tuple[Any, str | int, str]]:
    """Yield where a model's leaves of these kinds are that may be cast: holder, key, dotted name.

    No leaf is held meanwhile.
    """
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        name = f"{path}.{key}" if path else str(key)
        if str(key).startswith("_"):  # no parameter, by MLX's rule
            continue
        if isinstance(value, mx.array):
            if value.dtype in kinds and is_cast(name):
                yield node, key, name
        elif isinstance(value, dict | list):
            yield from float_places(value, is_cast, kinds, name)


def cast_leaves(model: Any, name: str, is_cast: IsCast, *, evaluates: bool = True) -> None:
    """Cast the leaves of `model`, an MLX module, to the dtype of that name, one after another.

    A leaf's buffer is taken over by its successor, or freed, so that memory never holds two copies.
    """
    places: dict[int, list[tuple[Any, str | int]]] = {}  # by leaf: a tied head is the embedding
    for holder, key, _ in float_places(model, is_cast, _CAST_FROM[name]):
        places.setdefault(id(holder[key]), []).append((holder, key))
    for (holder, key), *others in places.values():
        for other, at in others:
            other[at] = None
        holder[key] = leaf = holder[key].astype(getattr(mx, name))  # only the graph has the old one
        for other, at in others:
            other[at] = leaf
        if evaluates:
            mx.eval(leaf)


def compute_in(dtype: ComputeDtype, model: Any, *rules: Any, evaluates: bool = True) -> None:
    """Have `model`, an MLX module, compute in `dtype`; `rules` may say which leaves are cast.

    Unless it `evaluates`, arrays are left to be computed.
    """
    if dtype.is_dense:
        make_dense(model)
    if dtype.is_cast:
        # More bits do no harm.
        is_cast = cast_rule(model, *rules) if dtype.name != "float32" else lambda _name: True
        cast_leaves(model, dtype.name, is_cast, evaluates=evaluates)
    if dtype.is_dense and evaluates:
        for _, leaf in tree_flatten(model.parameters()):
            mx.eval(leaf)  # one by one: the codes of the layers before are freed by then
        mx.clear_cache()


def cast_rule(*models: Any) -> IsCast:
    """Return which leaves may be cast, as the first of `models` that says so has it.

    Upstream's `cast_predicate` is a property that gives a function, a method that does, or broken.
    """
    for model in models:
        try:
            found = getattr(model, "cast_predicate", None)
            rule: IsCast | None = found() if inspect.ismethod(found) else found
        except TypeError:  # a property of upstream's that calls another one
            continue
        if rule is not None:
            return rule
    return lambda name: not any(kept in name for kept in _KEPT)


def differs_when_decoded(model: Any, keeps_states: bool) -> bool:
    """Whether reusing what decoding wrote visibly changes the logits of `model`.

    Asked of what upstream built, not of names in a config. In float32 none differ beyond rounding.
    `keeps_states` says that some of its layers keep states. A recurrence that nobody has measured
    counts as one that differs.
    """
    network = model if isinstance(model, nn.Module) else model.model  # VLMLanguageModel holds one
    modules = [module for _, module in network.named_modules()]
    kinds = {array.dtype for _, array in tree_flatten(model.parameters())}
    is_packed = any(hasattr(each, "bits") and hasattr(each, "group_size") for each in modules)
    if not is_packed and not kinds & {mx.float16, mx.bfloat16}:
        return False
    is_latent = any(type(module).__name__ in LATENT for module in modules)
    # Of code that came with a checkpoint there is no file: upstream enters it nowhere.
    files = {type(module).__module__ for module in modules} & sys.modules.keys()
    names = {name for file in files for name in vars(sys.modules[file])}
    known = [RECURRENCES[name] for name in names & RECURRENCES.keys()]
    goes_token_by_token = bool(known) and all(known)
    return is_latent or (keeps_states and not goes_token_by_token)
