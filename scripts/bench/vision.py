"""Measures vision models without a server: a first turn of text, and turns with an image."""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx_vlm
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_vlm.models.cache import make_prompt_cache

from hearth.worker.engine.prefill_lengths import default_chunk
from scripts.fixtures.fixture_cache import VISION_NAMES, fixture_dir
from scripts.harness.vision_worker import LookingMachine, shown

ABOUT: Final = "a first text turn on a vision model against its language model; turns with images"
PROMPT_TOKENS: Final = 2_000
IMAGES_TOKENS: Final = 1_500  # of text before and behind the image

Figures = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fixtures", default=",".join(VISION_NAMES))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", type=Path)


def run(options: argparse.Namespace) -> None:
    told: Figures = {"chunk": default_chunk(), "prompt_tokens": PROMPT_TOKENS}
    for name in options.fixtures.split(","):
        told[name] = {"text": text_figures(name, options.pairs), "image": image_figures(name)}
        print(f"{name}: {json.dumps(told[name])}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(told, indent=1) + "\n")


def text_figures(name: str, pairs: int) -> Figures:
    """Return the CPU of a cold text request over that of the language model called directly.

    Both read the same tokens in the same chunks and sample one; pairs are interleaved, and which
    of the two comes first takes turns.
    """
    ours = LookingMachine(name, chunk=default_chunk())
    direct = Direct(name)
    ratios, spent = [], [0.0, 0.0]
    for number in range(-1, pairs):  # the first pair warms up
        ids = words(number, PROMPT_TOKENS)
        cuts = ours.rule.cuts(ids)
        runs: list[Any] = [
            lambda ids=ids: _ask(ours, ids),
            lambda ids=ids, c=cuts: direct.first(ids, c),
        ]
        cpu = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.process_time()
            runs[which]()
            cpu[which] = time.process_time() - start
        if number >= 0:
            ratios.append(cpu[0] / cpu[1])
            spent = [total + one for total, one in zip(spent, cpu, strict=True)]
    return {
        "cpu_ratio": round(statistics.median(ratios), 4),
        "cpu_ratio_of_sums": round(spent[0] / spent[1], 4),
        "direct_cpu_s": round(spent[1] / pairs, 4),
        "encoder_calls": ours.encoder_calls,
    }


def image_figures(name: str) -> Figures:
    """Return what two turns read and encode: one that shows an image, and one behind it."""
    ours = LookingMachine(name, chunk=default_chunk())
    first = [*words(1, IMAGES_TOKENS), *shown(name, 3), *words(2, 40)]
    rows = []
    for prompt in (first, first + words(3, 60)):
        start = time.process_time()
        answer = ours.ask(prompt, 1)
        rows.append(
            {
                "prompt": len(prompt),
                "cached": answer.cached,
                "prefilled": answer.prefilled,
                "cpu_s": round(time.process_time() - start, 4),
                "encoder_calls": ours.encoder_calls,
            }
        )
    return {"turns": rows}


class Direct:
    """A vision model's language model, called as its documentation has it."""

    def __init__(self, name: str) -> None:
        model, _ = mlx_vlm.load(str(fixture_dir(name)))
        self._language = model.language_model

    def first(self, ids: list[int], cuts: list[int]) -> int:
        """Read a prompt in the given pieces; return the likeliest next token."""
        with mx.stream(generation_stream):
            cache = make_prompt_cache(self._language)
            for start, end in zip([0, *cuts], cuts, strict=False):
                self._language(mx.array(ids[start:end])[None], cache=cache)
                mx.eval([layer.state for layer in cache])
                mx.clear_cache()
            logits = self._language(mx.array(ids[cuts[-1] :])[None], cache=cache).logits
            token = mx.argmax(logits[:, -1], axis=-1)
            token_id: Any = token.item()
            return int(token_id)


def words(seed: int, count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed + 10).integers(300, 2900, count).tolist()
    return ids


def _ask(ours: LookingMachine, ids: list[int]) -> None:
    with mx.stream(generation_stream):
        ours.scheduler.forget()
    assert ours.ask(ids, 1).cached == 0
