"""Measures what packing stored KV costs in quality, bytes and time, for each scheme and width.

`python -m scripts.bench stored` packs the KV of conversations, unpacks it, and goes on from there.
"pocket" is the trained model that comes with Hearth (rows of 64 elements), in bfloat16 as a Mac
computes it; any other name is a model directory.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine.model_loader import load_model
from hearth.worker.engine.prefill_lengths import default_chunk
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.quantise_kv import KVRows, LayerRows, PackedFormat, QuantFormat
from hearth.worker.kv.turboquant import TurboFormat
from scripts.pocket.conversation_tokens import messages_of
from scripts.pocket.conversations import talk

ABOUT: Final = "error, changed answers, bytes and time of stored KV in each scheme and width"
SENTENCES: Final = 60  # of the document that a conversation begins with
MOVES: Final = 4
COLUMNS: Final = (
    *("format", "bytes/token", "K rel", "V rel", "KL mean", "KL max"),
    *("changed", "pack ms/1k", "unpack ms/1k"),
)

Figures = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="pocket")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=24, help="greedy ones of an answer, at most")


def run(options: argparse.Namespace) -> Figures:
    told: Figures = {}
    for name in options.models.split(","):
        with mx.stream(generation_stream):
            told[name] = figures(name, options.prompts, options.tokens)
        shown = told[name]
        print(f"\n{name}: {shown['prompts']} prompts of {shown['tokens_mean']:.0f} tokens")
        for row in shown["formats"]:
            print(" | ".join(f"{row[column]!s:>12}" for column in COLUMNS), flush=True)
    return told


def formats(dtype: mx.Dtype) -> Iterator[tuple[str, PackedFormat | None]]:
    yield "off", None
    for bits in (8, 4):
        yield f"uniform {bits}", QuantFormat(bits, 64)
    for turbo_bits in (2, 2.5, 3, 3.5, 4, 5, 6, 8):
        yield f"turboquant {turbo_bits:g}", TurboFormat(turbo_bits, dtype)


@dataclass
class Model:
    """A model called directly, in bfloat16, and the map of its caches."""

    call: Any
    tokenizer: Any

    def __post_init__(self) -> None:
        self.call.set_dtype(mx.bfloat16)
        mx.eval(self.call.parameters())
        probe = self.new_cache()
        self.call(mx.zeros((1, 8), mx.int32), cache=probe)
        self.layers = LayerMap(probe)

    def new_cache(self) -> list[Any]:
        cache: list[Any] = make_prompt_cache(self.call)
        return cache

    def feed(self, ids: list[int], cache: list[Any]) -> mx.array:
        """Read tokens chunk by chunk; return the last one's log probabilities."""
        chunk = default_chunk()
        for at in range(0, len(ids), chunk):
            logits = self.call(mx.array([ids[at : at + chunk]]), cache=cache)[0, -1]
            mx.eval(logits)
        logits = logits.astype(mx.float32)
        return logits - mx.logsumexp(logits)

    def answer(self, last: int, cache: list[Any], count: int) -> tuple[mx.array, list[int]]:
        """Return the first token's log probabilities, and the greedy answer."""
        first = logprobs = self.feed([last], cache)
        tokens = [int(mx.argmax(first))]
        while len(tokens) < count and tokens[-1] not in self.tokenizer.eos_token_ids:
            logprobs = self.feed(tokens[-1:], cache)
            tokens.append(int(mx.argmax(logprobs)))
        return first, tokens


def model_of(name: str) -> Model:
    path = name
    loaded = load_model(load_settings({"MODEL_PATH": path}, None))
    return Model(loaded.model, loaded.tokenizer)


def prompts(tokenizer: Any, count: int) -> Iterator[list[int]]:
    """Yield the ids of conversations that end in a question, the generation prompt included."""
    for seed in range(count):
        messages, tools = messages_of(talk(random.Random(seed), MOVES, SENTENCES, 0))
        while messages[-1]["role"] != "user":
            messages.pop()
        yield tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, enable_thinking=False
        )


@dataclass
class Loss:
    """What one format loses, summed over prompts."""

    name: str
    form: PackedFormat | None
    nbytes: int = 0
    changed: int = 0
    kl: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])  # packing, unpacking
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])  # error of K, of V
    of_squares: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def back(self, raw: tuple[LayerRows, ...]) -> tuple[LayerRows, ...]:
        """Return rows packed and unpacked, and count their bytes, seconds and errors."""
        start = time.perf_counter()
        kept = KVRows(tuple(rows.converted(self.form) for rows in raw))
        mx.eval([rows.arrays for rows in kept.layers])
        packed = time.perf_counter()
        back = tuple(rows.converted(None) for rows in kept.layers)
        mx.eval([rows.arrays for rows in back])
        self.seconds[0] += packed - start
        self.seconds[1] += time.perf_counter() - packed
        self.nbytes += kept.nbytes
        for one, other in zip(raw, back, strict=True):
            for part in range(2):
                was = one.arrays[part].astype(mx.float32)
                error = was - other.arrays[part].astype(mx.float32)
                self.squares[part] += float((error * error).sum())
                self.of_squares[part] += float((was * was).sum())
        return back

    def compare(
        self, own: tuple[mx.array, list[int]], expected: tuple[mx.array, list[int]]
    ) -> None:
        p, q = (np.array(each[0], dtype=np.float64) for each in (expected, own))
        self.kl.append(max(0.0, float(np.sum(np.exp(p) * (p - q)))))
        self.changed += own[1] != expected[1]

    def row(self, tokens: int) -> Figures:
        relative = [
            (error / of) ** 0.5 for error, of in zip(self.squares, self.of_squares, strict=True)
        ]
        values = [
            *(f"{self.nbytes / tokens:.0f}", f"{relative[0]:.3%}", f"{relative[1]:.3%}"),
            *(f"{np.mean(self.kl):.2g}", f"{max(self.kl):.2g}"),
            f"{self.changed}/{len(self.kl)}",
            *(f"{each / tokens * 1e6:.1f}" for each in self.seconds),
        ]
        return dict(zip(COLUMNS, [self.name, *values], strict=True))


def figures(name: str, count: int, tokens_max: int) -> Figures:
    model = model_of(name)
    lengths: list[int] = []
    losses: list[Loss] = []
    for ids in prompts(model.tokenizer, count):
        cache, limit = model.new_cache(), len(ids) - 1
        model.feed(ids[:limit], cache)
        raw = model.layers.rows(cache, 0, limit)
        mx.eval([rows.arrays for rows in raw])
        if not losses:
            losses = [Loss(*each) for each in formats(raw[0].arrays[0].dtype)]
            for loss in losses:
                tuple(rows.converted(loss.form) for rows in raw)  # makes codebooks
        expected = None
        for loss in losses:
            restored = model.new_cache()
            model.layers.put_rows(restored, [loss.back(raw)], limit, limit + tokens_max)
            own = model.answer(ids[limit], restored, tokens_max)
            expected = expected or own
            loss.compare(own, expected)
        lengths.append(limit)
    rows = [loss.row(sum(lengths)) for loss in losses]
    header = dict(zip(COLUMNS, COLUMNS, strict=True))
    return {"prompts": count, "tokens_mean": sum(lengths) / count, "formats": [header, *rows]}
