"""Every kind of forward has the layers of its request's adapter."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from hearth.worker.engine.decode.decoder import Decoder, Sequence
from hearth.worker.engine.decode.tree_forward import make_tree_forward
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel
from scripts.harness.lora_files import ADAPTERS, adapted, upstream_adapted
from tests.helpers.models.drafted_decoding import any_prompt, drafted_sequence, said_by
from tests.helpers.models.oracle_drafter import TreeOracle

NAME, TOKENS = "qwen3", 30
PROMPT = any_prompt(70)


def sequence(model: LoadedModel, adapter: str, drafter: Any = None) -> Sequence:
    engine = Engine(model, batches=False)
    cache = engine.new_cache()
    engine.prefill(cache, PROMPT[:-1], adapter=adapter)
    made = drafted_sequence(cache, PROMPT, "greedy", drafter, TOKENS)
    return replace(made, adapter=model.adapters.of(adapter))


def decoder(model: LoadedModel) -> Decoder:
    with mx.stream(generation_stream):
        trees = make_tree_forward(model.model, lambda: make_prompt_cache(model.model))
    assert trees is not None
    return Decoder(model.model, generation_stream, is_mergeable=False, tree_forward=trees)


def upstreams(adapter: str) -> list[int]:
    """Return what a model says that has the adapter for good."""
    model = upstream_adapted(NAME, adapter)
    made = decoder(model)
    made.add(sequence(model, ""))
    return [made.step()[0].token_id for _ in range(TOKENS)]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_drafts_with_branches_are_verified_by_the_adapter(adapter: str) -> None:
    truth = upstreams(adapter)
    made, drafter = decoder(adapted(NAME)), TreeOracle(truth)
    made.add(sequence(adapted(NAME), adapter, drafter))
    assert said_by(made, TOKENS) == truth
    assert drafter.branched > 3 and drafter.forwards < 0.7 * TOKENS


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_prefill_that_keeps_hidden_states_writes_the_adapters_kv(adapter: str) -> None:
    rows = []
    for model, name in ((adapted(NAME), adapter), (upstream_adapted(NAME, adapter), "")):
        engine = Engine(model, batches=False)
        cache = engine.new_cache()
        hidden = engine.prefill_with_hidden(cache, PROMPT, (), name, tokens_max=4)
        rows.append([hidden, *(each for layer in cache for each in layer.state)])
    for mine, theirs in zip(*rows, strict=True):
        assert np.array_equal(np.array(mine), np.array(theirs))


class _Following:
    """A draft model that keeps what it is told."""

    token_cost = 0.0

    def __init__(self) -> None:
        self.hidden: list[Any] = []

    def take(self, start: int, tokens: Any, hidden: Any) -> None:
        self.hidden.append(np.array(hidden))

    def look_at(self, cache: Any) -> None:
        pass

    def draft(self, place: int, last: int, tokens_max: int) -> list[int]:
        return []


def test_a_draft_model_is_told_the_adapters_hidden_states() -> None:
    said = []
    for model, name in ((adapted(NAME), "one"), (upstream_adapted(NAME, "one"), "")):
        made, told = decoder(model), _Following()
        drafter = TreeOracle([0] * TOKENS, 1.0, [0])
        made.add(replace(sequence(model, name, drafter), draft_model=told))
        tokens = [made.step()[0].token_id for _ in range(4)]
        said.append((tokens, told.hidden))
    (mine, one), (theirs, other) = said
    assert mine == theirs and len(one) == len(other) > 2
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
