"""Checks whether a bfloat16 checkpoint computes as well in float16 on this machine.

Both dtypes are compared with float32. Answers in bfloat16 cannot be the measure: they lie some
eight times as far from float32 as answers in float16, so that even the likeliest token differs at
some positions. The model may serve requests at the same time. Its weights stay where they are and
are cast only for computing: one layer at a time, but weights outside of layers (the embedding, the
head) for a whole forward.
Owner: the inference thread.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten

from hearth.worker.doctor.check_context import CheckContext, LeftOut, Steps
from hearth.worker.doctor.findings import Figure
from hearth.worker.engine.compute_dtype import (
    cast_rule,
    device_architecture,
    emulates_bfloat16,
    float_leaves,
)
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.vision.vlm_language_model import VLMLanguageModel

NAME: Final = "float16"
PIECE: Final = 64  # tokens of one forward, and so of one step; three forwards read each token
FLOAT16_MAX: Final = 65_504.0
HEADROOM: Final = 4  # other prompts may have larger activations than the canary

# Tokens of the canary that are read: each takes three forwards, and each piece casts every layer.
TOKENS_MAX: Final = 512

NewCache = Callable[[], list[Any]]
OnActivations = Callable[[Sequence[mx.array]], None]
WeightSlot = tuple[Any, str | int]  # a container of a weight, and the key in it


def check_float16(context: CheckContext) -> Steps:
    """Report whether the model should compute in float16 from the next start on."""
    if not emulates_bfloat16(device_architecture()):
        raise LeftOut("this device computes bfloat16 itself")
    if context.canary is None:
        raise LeftOut("there is no canary to read")
    layers, rest = _weight_slots(context.loaded)
    sizes = [sum(holder[key].size for holder, key in slots) for slots in (*layers.values(), rest)]
    needed = (max(sizes[:-1], default=0) + sizes[-1]) * mx.float32.size
    context.require_bytes(needed, "a layer, and all beside layers, in float32")
    tokens = context.prompts()[-1][:TOKENS_MAX]
    found = yield from compare_dtypes(context.loaded, context.engine.new_cache, tokens)
    reason = found.why_not_good()
    context.report("ok", found.figures | {NAME: not reason}, reason)


def compare_dtypes(
    loaded: LoadedModel, new_cache: NewCache, tokens: Sequence[int], piece: int = PIECE
) -> Generator[None, None, "DtypeComparison"]:
    """Read `tokens` in float32, bfloat16 and float16, and return the comparison.

    A step is one forward of a piece. At each yield the weights have their own dtype again, and
    requests may be served. Closing the generator ends the check.

    Raises:
        LeftOut: the dtypes cannot be compared.
    """
    if loaded.dtype.name != "bfloat16":
        raise LeftOut(f"the weights are {loaded.dtype.name or 'no floats'}")
    comparison = DtypeComparison(loaded, new_cache)
    try:
        for start in range(0, len(tokens), piece):
            yield from comparison.read(tokens[start : start + piece])
    except Exception as error:  # an architecture or the device may raise anything in another dtype
        raise LeftOut(" ".join(str(error).split()) or type(error).__name__) from error
    return comparison


def _root(loaded: LoadedModel) -> Any:
    """Return the MLX module that computes text, without mlx-vlm's towers, which are not cast."""
    model = loaded.model
    return model.model if isinstance(model, VLMLanguageModel) else model


def _weight_slots(loaded: LoadedModel) -> tuple[dict[int, list[WeightSlot]], list[WeightSlot]]:
    """Return the slots of weights that may be cast: those of each layer by its id, and others."""
    towers = [loaded.vision.model] if loaded.vision is not None else []
    found = list(float_leaves(_root(loaded), cast_rule(_root(loaded), *towers)))
    layer_of = {
        id(module): id(layer) for layer in loaded.model.layers for module in layer.modules()
    }
    layers: dict[int, list[WeightSlot]] = {id(layer): [] for layer in loaded.model.layers}
    rest: list[WeightSlot] = []
    for holder, key, _ in found:
        layers.get(layer_of.get(id(holder), 0), rest).append((holder, key))
    return layers, rest


# ---------------------------------------------------------------- the comparison


@dataclass
class DtypeComparison:
    """Reads the same tokens with one model in three dtypes, and compares the logits."""

    loaded: LoadedModel
    new_cache: NewCache
    positions: int = 0
    is_finite: bool = True
    largest: float = 0.0  # largest activation between two layers in float16
    unlike: Counter[str] = field(default_factory=Counter)  # positions with another argmax
    squares: defaultdict[str, float] = field(  # sums of squared differences from float32
        default_factory=lambda: defaultdict(float)
    )
    caches: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.caches = {name: self.new_cache() for name in ("float32", "bfloat16", "float16")}

    def read(self, tokens: Sequence[int]) -> Iterator[None]:
        """Read the next tokens in each dtype, and compare; yield after each forward."""
        exact = self.logits(tokens, "float32")
        best = mx.argmax(exact, axis=-1)
        for name in ("bfloat16", "float16"):
            yield
            logits = self.logits(tokens, name)
            unlike = mx.sum(mx.argmax(logits, axis=-1) != best)
            squares = mx.mean(mx.square(logits - exact), axis=-1).sum()
            self.unlike[name] += int(_number(unlike))
            self.squares[name] += _number(squares)
            self.is_finite &= name != "float16" or bool(_number(mx.isfinite(logits).all()))
        self.positions += len(tokens)
        mx.clear_cache()
        yield

    def logits(self, tokens: Sequence[int], name: str) -> mx.array:
        """Return a forward's logits (n, vocabulary) in the named dtype, as float32."""
        model, cache = self.loaded.model, self.caches[name]
        ids = mx.array([list(tokens)])
        if name == "bfloat16":
            logits = model(ids, cache=cache)
        else:
            on_activations = self._record_largest if name == "float16" else None
            with _computing_in(self.loaded, getattr(mx, name), on_activations):
                logits = model(ids, cache=cache)
                mx.eval(logits, [layer.state for layer in cache])
        logits = logits[0].astype(mx.float32)
        mx.eval(logits, [layer.state for layer in cache])
        return logits

    def _record_largest(self, arrays: Sequence[mx.array]) -> None:
        for array in arrays:
            self.largest = max(self.largest, _number(mx.abs(array).max()))

    @property
    def figures(self) -> dict[str, Figure]:
        count = max(self.positions, 1)
        figures: dict[str, Figure] = {"positions": self.positions, "finite": self.is_finite}
        for name in ("bfloat16", "float16"):
            figures[f"{name}_unlike"] = self.unlike[name]
            figures[f"{name}_error"] = (self.squares[name] / count) ** 0.5
        return figures | {"largest": self.largest}

    def why_not_good(self) -> str:
        """Return why float16 must not replace bfloat16; "" if it may."""
        if not self.is_finite:
            return "logits in float16 are not finite"
        if not self.largest * HEADROOM <= FLOAT16_MAX:  # true for NaN, too
            return f"an activation is {self.largest:,.0f}, and float16 ends at {FLOAT16_MAX:,.0f}"
        kinds = [
            [array.dtype for array in _arrays([layer.state for layer in self.caches[name]])]
            for name in ("bfloat16", "float16")
        ]
        if any(old == mx.bfloat16 != new == mx.float32 for old, new in zip(*kinds, strict=True)):
            return "some layers compute in float32 beside float16, and would keep twice the KV"
        if self.unlike["float16"] > self.unlike["bfloat16"]:
            return (
                f"the likeliest token is another one than in float32 at {self.unlike['float16']} "
                f"of {self.positions} positions, in bfloat16 at {self.unlike['bfloat16']}"
            )
        if not self.squares["float16"] <= self.squares["bfloat16"]:
            return "logits in float16 are further from float32 than those in bfloat16"
        return ""


def _number(array: mx.array) -> float:
    value: Any = array.item()
    return float(value)


# ---------------------------------------------------------------- one layer at a time


@contextmanager
def _computing_in(
    loaded: LoadedModel, dtype: mx.Dtype, on_activations: OnActivations | None
) -> Iterator[None]:
    """Let a model compute in `dtype` within the block; restore it in any case."""
    slots_by_layer, rest = _weight_slots(loaded)
    values = [value for module in _root(loaded).modules() for value in module.values()]
    replaced = [
        (layers, index, layer)
        for layers in values
        if isinstance(layers, list)
        for index, layer in enumerate(layers)
        if id(layer) in slots_by_layer
    ]
    try:
        for layers, index, layer in replaced:
            layers[index] = _CastLayer(layer, slots_by_layer[id(layer)], dtype, on_activations)
        with _cast(rest, dtype):
            yield
    finally:
        for layers, index, layer in replaced:
            layers[index] = layer


@contextmanager
def _cast(slots: Sequence[WeightSlot], dtype: mx.Dtype) -> Iterator[None]:
    """Cast the weights to `dtype` within the block."""
    leaves = [holder[key] for holder, key in slots]
    try:
        for (holder, key), leaf in zip(slots, leaves, strict=True):
            holder[key] = leaf.astype(dtype)
        yield
    finally:
        for (holder, key), leaf in zip(slots, leaves, strict=True):
            holder[key] = leaf


class _CastLayer:
    """Stands for a layer of the model: casts its weights for a call, and evaluates the result.

    Evaluation leaves no graph, so the cast weights are freed before the next layer is cast.
    """

    def __init__(
        self,
        layer: Any,
        slots: Sequence[WeightSlot],
        dtype: mx.Dtype,
        on_activations: OnActivations | None,
    ) -> None:
        self._layer, self._slots, self._dtype, self._on_activations = (
            layer,
            slots,
            dtype,
            on_activations,
        )

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with _cast(self._slots, self._dtype):
            result = self._layer(*arguments, **named)
            outputs = _arrays(result)
            caches = [value for value in (*arguments, *named.values()) if hasattr(value, "state")]
            mx.eval(outputs, [cache.state for cache in caches])
        if self._on_activations is not None:
            self._on_activations(
                [array for array in outputs if mx.issubdtype(array.dtype, mx.floating)]
            )
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)  # models read attributes of their layers


def _arrays(tree: Any) -> list[mx.array]:
    leaves = tree_flatten(tree) if isinstance(tree, dict | list | tuple) else [("", tree)]
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
