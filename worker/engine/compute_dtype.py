"""Chooses what a checkpoint's bfloat16 numbers are computed in, and casts them.

The GPUs of M1 and M2 emulate bfloat16, and compute float16 themselves. Numbers that are packed
(quantised weights) or float32 stay as they are.
Owner: the inference thread.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten

_EMULATES: Final = re.compile(r"applegpu_g1[34]\D*")  # g13 is M1, g14 is M2; then the size, as "s"
# Where a model does not say which of its leaves are not to be cast: decay rates of states, and
# biases of routers, which several architectures keep in more bits.
_KEPT: Final = ("A_log", "e_score_correction_bias")

IsCast = Callable[[str], bool]  # takes a leaf's dotted name


@dataclass(frozen=True, slots=True)
class ComputeDtype:
    """What a model's numbers are computed in, and why."""

    name: str = ""  # of most of them, e.g. "float16"
    is_cast: bool = False  # to float16, from the checkpoint's bfloat16
    reason: str = ""

    def row(self) -> dict[str, Any]:
        return {"name": self.name, "cast": self.is_cast, "reason": self.reason}


def emulates_bfloat16(architecture: str) -> bool:
    """Whether a GPU, as `mx.device_info()` names its architecture, has no bfloat16 of its own."""
    return _EMULATES.fullmatch(architecture) is not None


def device_architecture() -> str:
    """Return what the device calls its architecture, e.g. "applegpu_g13s" on an M1 Max."""
    return str(mx.device_info().get("architecture", ""))


def choose_dtype(
    setting: str, checkpoint: str, architecture: str, is_float16_good: bool | None
) -> ComputeDtype:
    """Return what to compute in where DTYPE is `setting` and the checkpoint's numbers are given.

    `is_float16_good` is what the checks of this model found on this machine, None before they ran.
    """
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


def dtype_of(model: Any) -> str:
    """Return the dtype of most floats of a model, e.g. "bfloat16"; "" where it has none."""
    sizes: Counter[str] = Counter()
    for _, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[str(array.dtype).rpartition(".")[2]] += array.size
    return sizes.most_common(1)[0][0] if sizes else ""


def bfloat16_places(
    node: Any, is_cast: IsCast, path: str = ""
) -> Iterator[tuple[Any, str | int, str]]:
    """Yield where a model's bfloat16 leaves are that may be cast: holder, key and dotted name.

    No leaf is held meanwhile.
    """
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        name = f"{path}.{key}" if path else str(key)
        if str(key).startswith("_"):  # no parameter, by MLX's rule
            continue
        if isinstance(value, mx.array):
            if value.dtype == mx.bfloat16 and is_cast(name):
                yield node, key, name
        elif isinstance(value, dict | list):
            yield from bfloat16_places(value, is_cast, name)


def cast_to_float16(model: Any, is_cast: IsCast) -> None:
    """Cast the bfloat16 leaves of `model`, an MLX module, one after another.

    A leaf's buffer is taken over by its successor, so that memory never holds two copies.
    """
    places: dict[int, list[tuple[Any, str | int]]] = {}  # by leaf: a tied head is the embedding
    for holder, key, _ in bfloat16_places(model, is_cast):
        places.setdefault(id(holder[key]), []).append((holder, key))
    for (holder, key), *others in places.values():
        for other, name in others:
            other[name] = None
        holder[key] = leaf = holder[key].astype(mx.float16)  # only the graph has the old one now
        for other, name in others:
            other[name] = leaf
        mx.eval(leaf)


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
