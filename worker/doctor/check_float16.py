"""Checks whether a checkpoint of bfloat16 computes as well in float16, on this machine.

Both are held to float32. Answers in bfloat16 cannot be the measure: they lie some eight times as
far from float32 as those in float16, so that even the likeliest token differs at some places.
The model may be a server's own: its weights stay where they are, and are cast for one part (a
layer, the embedding, the head) at a time, while that computes.
Owner: the inference thread.
"""

import inspect
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from hearth.worker.doctor.check_context import CheckContext, LeftOut, Steps
from hearth.worker.doctor.findings import CheckResult, Figure
from hearth.worker.engine.compute_dtype import (
    IsCast,
    cast_rule,
    device_architecture,
    emulates_bfloat16,
    float_places,
)
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.vision.vlm_language_model import VLMLanguageModel

NAME: Final = "float16"
PIECE: Final = 64  # tokens of one forward, and so of one step: three forwards read each token
FLOAT16_MAX: Final = 65_504.0
HEADROOM: Final = 4  # another prompt may reach further than the canary; it must stay finite too

TOKENS_MAX: Final = (
    512  # of the canary: three forwards of each, and every layer cast for each piece
)

NewCache = Callable[[], list[Any]]
Place = tuple[Any, str | int]  # a holder and the key of what it holds


def check_float16(context: CheckContext) -> Steps:
    """Tell whether the model is to be computed in float16 from its next start on."""
    if not emulates_bfloat16(device_architecture()):
        raise LeftOut("this device computes bfloat16 itself")
    if context.canary is None:
        raise LeftOut("there is no canary to read")
    context.needs(check_bytes(context.loaded), "the largest part of the model in float32")
    tokens = context.prompts()[-1][:TOKENS_MAX]
    found = yield from compare_dtypes(context.loaded, context.engine.new_cache, tokens)
    context.tell(found.verdict, dict(found.figures), found.reason)


def compare_dtypes(
    loaded: LoadedModel, new_cache: NewCache, tokens: Sequence[int], piece: int = PIECE
) -> Generator[None, None, CheckResult]:
    """Read `tokens` in float32, bfloat16 and float16, and return what was found.

    A step is one forward of a piece. It ends at each yield: the weights are then what they were,
    and others may compute. Closing the generator ends the check. The figure "float16" says whether
    it may stand in for bfloat16.
    """
    if loaded.dtype.name != "bfloat16":
        reason = f"the weights are {loaded.dtype.name or 'no floats'}"
        return CheckResult(NAME, "left out", reason=reason)
    comparison = DtypeComparison(loaded, new_cache)
    computed_s = 0.0
    try:
        for start, end in pairwise([*range(0, len(tokens), piece), len(tokens)]):
            for seconds in comparison.read(tokens[start:end]):
                computed_s += seconds
                yield
    except Exception as error:  # whatever an architecture or the device raises in another dtype
        reason = " ".join(str(error).split()) or type(error).__name__
        return CheckResult(NAME, "left out", {}, computed_s, reason)
    reason = comparison.why_not_good()
    return CheckResult(NAME, "ok", comparison.figures | {NAME: not reason}, computed_s, reason)


def check_bytes(loaded: LoadedModel) -> int:
    """Return what the check takes beside the weights: the largest part of the model in float32."""
    root, rule = _root(loaded), _rule(loaded)
    parts = [part.nbytes for _, part, _ in _parts(root, loaded.model.layers, rule, mx.float32)]
    return max(parts, default=0)


def _root(loaded: LoadedModel) -> Any:
    """Return the MLX module that computes: without mlx-vlm's towers, which stay as they are."""
    model = loaded.model
    return model.model if isinstance(model, VLMLanguageModel) else model


def _rule(loaded: LoadedModel) -> IsCast:
    towers = [loaded.vision.model] if loaded.vision is not None else []
    return cast_rule(_root(loaded), *towers)


# ---------------------------------------------------------------- what is compared


@dataclass
class DtypeComparison:
    """One model that reads the same tokens in three dtypes, and how far apart the logits are."""

    loaded: LoadedModel
    new_cache: NewCache
    positions: int = 0
    is_finite: bool = True
    largest: float = 0.0  # activation between two parts, in float16
    unlike: dict[str, int] = field(default_factory=dict)  # positions with another argmax
    squares: dict[str, float] = field(default_factory=dict)  # of the differences to float32
    caches: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.caches = {name: self.new_cache() for name in ("float32", "bfloat16", "float16")}

    def read(self, tokens: Sequence[int]) -> Iterator[float]:
        """Read the next tokens in each dtype, and compare; yield the seconds of each forward."""
        began = time.monotonic()
        exact = self.logits(tokens, "float32")
        best = mx.argmax(exact, axis=-1)
        for name in ("bfloat16", "float16"):
            yield time.monotonic() - began
            began = time.monotonic()
            logits = self.logits(tokens, name)
            unlike = mx.sum(mx.argmax(logits, axis=-1) != best)
            squares = mx.mean(mx.square(logits - exact), axis=-1).sum()
            self.unlike[name] = self.unlike.get(name, 0) + int(_number(unlike))
            self.squares[name] = self.squares.get(name, 0.0) + _number(squares)
            self.is_finite &= name != "float16" or bool(_number(mx.isfinite(logits).all()))
        self.positions += len(tokens)
        mx.clear_cache()
        yield time.monotonic() - began

    def logits(self, tokens: Sequence[int], name: str) -> mx.array:
        """Return logits (n, vocabulary) as float32, of a forward in the dtype of that name."""
        model, cache = self.loaded.model, self.caches[name]
        dtype = getattr(mx, name)
        ids = mx.array([list(tokens)])
        if name == "bfloat16":
            logits = model(ids, cache=cache)
        else:
            see = self._see if name == "float16" else _see_nothing
            with _computing_in(_root(self.loaded), model.layers, _rule(self.loaded), dtype, see):
                logits = model(ids, cache=cache)
                mx.eval(logits, [layer.state for layer in cache])
        logits = logits[0].astype(mx.float32)
        mx.eval(logits, [layer.state for layer in cache])
        return logits

    def _see(self, arrays: Sequence[mx.array]) -> None:
        for array in arrays:
            self.largest = max(self.largest, _number(mx.abs(array).max()))

    @property
    def figures(self) -> dict[str, Figure]:
        count = max(self.positions, 1)
        figures: dict[str, Figure] = {"positions": self.positions, "finite": self.is_finite}
        for name in ("bfloat16", "float16"):
            figures[f"{name}_unlike"] = self.unlike.get(name, 0)
            figures[f"{name}_error"] = (self.squares.get(name, 0.0) / count) ** 0.5
        return figures | {"largest": self.largest}

    def why_not_good(self) -> str:
        """Return why float16 must not stand in for bfloat16; "" where it may."""
        error = {name: self.squares.get(name, 0.0) for name in ("bfloat16", "float16")}
        if not self.is_finite:
            return "logits in float16 are not finite"
        if not self.largest * HEADROOM <= FLOAT16_MAX:  # not a number included
            return f"an activation is {self.largest:,.0f}, and float16 ends at {FLOAT16_MAX:,.0f}"
        kinds = [
            [array.dtype for array in _arrays([layer.state for layer in self.caches[name]])]
            for name in ("bfloat16", "float16")
        ]
        if any(was == mx.bfloat16 != now == mx.float32 for was, now in zip(*kinds, strict=True)):
            return "some layers compute in float32 beside float16, and would keep twice the KV"
        if self.unlike["float16"] > self.unlike["bfloat16"]:
            return (
                f"the likeliest token is another one than in float32 at {self.unlike['float16']} "
                f"of {self.positions} positions, in bfloat16 at {self.unlike['bfloat16']}"
            )
        if not error["float16"] <= error["bfloat16"]:
            return "logits in float16 are further from float32 than those in bfloat16"
        return ""


def _number(array: mx.array) -> float:
    value: Any = array.item()
    return float(value)


# ---------------------------------------------------------------- one part at a time


@contextmanager
def _computing_in(
    root: Any,
    layers: Sequence[Any],
    rule: IsCast,
    dtype: mx.Dtype,
    see: Callable[[Sequence[mx.array]], None],
) -> Iterator[None]:
    """Have the model `root` compute in `dtype` meanwhile; it is put back whatever happens."""
    held: list[tuple[Any, str | int, Any]] = []
    try:
        for (holder, key), part, loose in [*_parts(root, layers, rule, dtype)]:
            held.append((holder, key, holder[key]))
            part.see = see
            holder[key] = holder[key].astype(dtype) if loose else part
        yield
    finally:
        for holder, key, value in held:
            holder[key] = value


def _see_nothing(_arrays: Sequence[mx.array]) -> None:
    return


class _CastPart:
    """Stands for a module of the model: casts its leaves while that computes, and evaluates.

    No graph is left behind, so that the cast leaves are freed before the next part's are made.
    """

    def __init__(self, module: Any, places: Sequence[Place], dtype: mx.Dtype) -> None:
        self.see: Callable[[Sequence[mx.array]], None] = _see_nothing
        self._module = module
        self._places = places
        self._dtype = dtype

    @property
    def nbytes(self) -> int:
        return sum(holder[key].size for holder, key in self._places) * self._dtype.size

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._compute(self._module, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        """What others read of the module: a method computes as a call does, a leaf is cast."""
        value = getattr(self._module, name)
        if inspect.ismethod(value):
            return partial(self._compute, value)
        is_leaf = isinstance(value, mx.array) and value.dtype == mx.bfloat16
        return value.astype(self._dtype) if is_leaf else value

    def _compute(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        leaves = [holder[key] for holder, key in self._places]
        try:
            for (holder, key), leaf in zip(self._places, leaves, strict=True):
                holder[key] = leaf.astype(self._dtype)
            result = function(*arguments, **named)
            made = _arrays(result)
            caches = [value for value in (*arguments, *named.values()) if hasattr(value, "state")]
            mx.eval(made, [cache.state for cache in caches])
            self.see([array for array in made if mx.issubdtype(array.dtype, mx.floating)])
            return result
        finally:
            for (holder, key), leaf in zip(self._places, leaves, strict=True):
                holder[key] = leaf


def _parts(
    node: Any, layers: Sequence[Any], rule: IsCast, dtype: mx.Dtype, path: str = ""
) -> Iterator[tuple[Place, _CastPart, bool]]:
    """Yield what the model is made of: each layer, and what stands beside them on the way there.

    The last says whether it is a leaf, and no module.
    """
    wanted = {id(layer) for layer in layers}
    items = list(node.items() if isinstance(node, dict) else enumerate(node))
    for key, value in items:
        name = f"{path}.{key}" if path else str(key)
        if str(key).startswith("_"):  # no parameter, by MLX's rule
            continue
        if isinstance(value, mx.array):
            if value.dtype == mx.bfloat16 and rule(name):
                yield (node, key), _CastPart(value, [(node, key)], dtype), True
        elif isinstance(value, nn.Module) and (id(value) in wanted or not _leads_to(value, wanted)):
            places = [place[:2] for place in float_places(value, rule, path=name)]
            yield (node, key), _CastPart(value, places, dtype), False
        elif isinstance(value, dict | list):
            yield from _parts(value, layers, rule, dtype, name)


def _leads_to(node: Any, wanted: set[int]) -> bool:
    """Whether one of the modules `wanted` is somewhere in `node`."""
    if not isinstance(node, dict | list):
        return False
    values = node.values() if isinstance(node, dict) else node
    return any(id(value) in wanted or _leads_to(value, wanted) for value in values)


def _arrays(tree: Any) -> list[mx.array]:
    leaves = tree_flatten(tree) if isinstance(tree, dict | list | tuple) else [("", tree)]
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
