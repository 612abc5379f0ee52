"""Measures a decode step of branches on one trunk beside one of as many copies. Asserts no timing.

The model has one layer in the proportions of a real one (Qwen3-8B's by default) and no head to
speak of, and its KV is made up: a layer's attention and MLP weigh as they do there. Both sides'
steps alternate, so that what else the machine does burdens both; CPU seconds are the process's.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.qwen3 import Model, ModelArgs

from hearth.worker.engine.decode.decoder import Decoder, Sequence
from hearth.worker.engine.decode.sampler import TokenChoice, greedy
from hearth.worker.engine.decode.trunk_attention import reach_trunks

ABOUT = "K branches on one trunk beside K copies: bytes, logits, CPU of a step"

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 12_288, 32, 8, 128, 512
TAIL = 64
CHOICE = TokenChoice(sampler=greedy, processors=(), top_logprobs=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trunks", default="4096,16384", help="tokens")
    parser.add_argument("--branches", default="8")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--bits", type=int, default=0, help="of the weights; 0 = float32")
    parser.add_argument("--shrink", type=int, default=1, help="divide width, heads and MLP by this")
    parser.add_argument("--out", type=Path)


def run(options: argparse.Namespace) -> None:
    model = _model(options.shrink, options.bits)
    reach_trunks(model)
    told = []
    for trunk in map(int, options.trunks.split(",")):
        for branches in map(int, options.branches.split(",")):
            figures = _compare(model, trunk, branches, options.steps)
            told.append(figures)
            print(json.dumps(figures), flush=True)
    if options.out:
        options.out.write_text(json.dumps(told, indent=1) + "\n")


def _model(shrink: int, bits: int) -> Any:
    mx.random.seed(0)
    model = Model(
        ModelArgs(
            model_type="qwen3",
            hidden_size=HIDDEN // shrink,
            num_hidden_layers=1,
            intermediate_size=MLP // shrink,
            num_attention_heads=HEADS // shrink,
            rms_norm_eps=1e-6,
            vocab_size=VOCABULARY,
            num_key_value_heads=max(1, KV_HEADS // shrink),
            max_position_embeddings=65_536,
            rope_theta=1e6,
            head_dim=HEAD_DIM,
            tie_word_embeddings=True,
        )
    )
    if bits:
        nn.quantize(model, bits=bits)
    mx.eval(model.parameters())
    return model


def _compare(model: Any, trunk: int, branches: int, steps: int) -> dict[str, Any]:
    """Return what a step of branches on a trunk, and one of copies, takes."""
    kv_heads = model.args.num_key_value_heads
    common = [mx.random.normal((1, kv_heads, trunk, HEAD_DIM)) for _ in "kv"]
    sides = {}
    for side, lineage in (("copies", None), ("trunk", "a")):
        # `run` has reached the model's trunks: there is nothing to try.
        decoder = sides[side] = Decoder(
            model, generation_stream, is_mergeable=True, try_trunks=lambda: True
        )
        mx.random.seed(2)
        for number in range(branches):
            own = [mx.random.normal((1, kv_heads, TAIL, HEAD_DIM)) for _ in "kv"]
            (layer,) = cache = make_prompt_cache(model)
            with mx.stream(generation_stream):
                layer.update_and_fetch(*map(_joined, common, own))
                mx.eval(layer.state)
            tokens = [1] * trunk + [2 + number] * TAIL
            decoder.add(
                Sequence(f"{number}", cache, tokens, [3], CHOICE, steps + 9, lineage=lineage)
            )
    spent: dict[str, list[float]] = {"copies": [], "trunk": []}
    logprobs: dict[str, dict[str, mx.array]] = {}
    for _ in range(steps + 2):
        for side, decoder in sides.items():
            mx.synchronize(generation_stream)
            began = time.process_time()
            sampled = decoder.step()
            mx.synchronize(generation_stream)
            spent[side].append(time.process_time() - began)
            logprobs[side] = {one.key: one.logprobs for one in sampled if one.logprobs is not None}
    # The first two join, and grow buffers.
    cpu = {side: statistics.median(seconds[2:]) for side, seconds in spent.items()}
    held = {side: decoder.batch_bytes for side, decoder in sides.items()}
    pairs = [(logprobs["copies"][key], logprobs["trunk"][key]) for key in logprobs["trunk"]]
    row = 2 * kv_heads * HEAD_DIM * 4
    return {
        "trunk": trunk,
        "branches": branches,
        "on_trunk": len(sides["trunk"].trunks),
        "cpu_ms": {side: round(1e3 * seconds, 1) for side, seconds in cpu.items()},
        "cpu_ratio": round(cpu["trunk"] / cpu["copies"], 3),
        "held_mb": {side: round(nbytes / 1e6, 1) for side, nbytes in held.items()},
        "held_over_trunk_and_tails": round(
            held["trunk"] / ((trunk + branches * (TAIL + steps + 2)) * row), 3
        ),
        "logits_differ": max(float(mx.abs(one - other).max()) for one, other in pairs),
    }


def _joined(one: mx.array, other: mx.array) -> mx.array:
    return mx.concatenate([one, other], axis=2)
