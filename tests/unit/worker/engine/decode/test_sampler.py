"""Checks how tokens are sampled: seeds, filters, penalties, bias."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from hearth.shared.errors import RequestError
from hearth.shared.settings import load_settings
from hearth.shared.wire_messages import Sampling
from hearth.worker.engine.decode.sampler import (
    SamplingDefaults,
    check,
    make_sampling_params,
    sampling_defaults,
)

VOCABULARY = 50
DEFAULTS = SamplingDefaults()
OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def draws(sampling: Sampling, logits: mx.array, count: int = 200) -> list[int]:
    choice = make_sampling_params(sampling, DEFAULTS, VOCABULARY, prompt_length=2)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return [int(choice.sampler(logprobs, [place]).item()) for place in range(count)]


def ramp() -> mx.array:
    return (mx.arange(VOCABULARY) * 0.1)[None]


def test_a_seed_repeats_its_draws_and_another_one_does_not() -> None:
    first = draws(Sampling(temperature=1.0, seed=7, **OFF), ramp())
    mx.random.seed(99)  # nothing outside a request may change what it draws
    assert draws(Sampling(temperature=1.0, seed=7, **OFF), ramp()) == first
    assert draws(Sampling(temperature=1.0, seed=8, **OFF), ramp()) != first
    assert draws(Sampling(temperature=1.0, **OFF), ramp()) != draws(
        Sampling(temperature=1.0, **OFF), ramp()
    )


def test_tokens_of_several_places_are_drawn_together_as_one_by_one() -> None:
    sampling = Sampling(temperature=1.0, seed=7, **{**OFF, "top_p": 0.9})
    choice = make_sampling_params(sampling, DEFAULTS, VOCABULARY, prompt_length=2)
    logits = mx.concatenate([ramp(), ramp() * 0.5, -ramp()])
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    places = [4, 5, 9]
    together = choice.sampler(logprobs, places).tolist()
    alone = [choice.sampler(logprobs[n : n + 1], [place]) for n, place in enumerate(places)]
    assert together == mx.concatenate(alone).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-5])
def test_a_temperature_of_nothing_takes_the_likeliest(temperature: float) -> None:
    assert set(draws(Sampling(temperature=temperature), ramp())) == {VOCABULARY - 1}


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [({"top_k": 3}, {47, 48, 49}), ({"top_p": 0.0}, {49}), ({"min_p": 0.95}, {49})],
    ids=["top_k", "top_p", "min_p"],
)
def test_filters_keep_only_the_likeliest(limits: dict[str, float], allowed: set[int]) -> None:
    sampling = Sampling(temperature=2.0, seed=1, **{**OFF, **limits})
    assert set(draws(sampling, ramp())) == allowed


def test_the_draws_follow_the_probabilities() -> None:
    logits = mx.log(mx.array([[0.7, 0.2, 0.1]]))
    choice = make_sampling_params(
        Sampling(temperature=1.0, seed=3, **OFF), DEFAULTS, 3, prompt_length=2
    )
    counts = [0, 0, 0]
    for place in range(2000):
        counts[int(choice.sampler(logits, [place]).item())] += 1
    assert counts[0] == pytest.approx(1400, abs=100)
    assert counts[1] == pytest.approx(400, abs=80)


def processed(sampling: Sampling, tokens: list[int]) -> list[float]:
    choice = make_sampling_params(sampling, DEFAULTS, VOCABULARY, prompt_length=2)
    logits = mx.ones((1, VOCABULARY))
    for process in choice.processors:
        logits = process(mx.array(tokens), logits)
    values: list[float] = logits[0].tolist()
    return values


def test_presence_and_frequency_count_only_what_was_generated() -> None:
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.0)
    values = processed(sampling, [4, 5, 6, 6])  # the prompt is 4, 5
    assert values[4] == values[5] == 1.0
    assert values[6] == pytest.approx(1 - 0.5 - 2 * 0.25)
    assert processed(sampling, [4, 5]) == [1.0] * VOCABULARY


def test_the_repetition_penalty_counts_the_prompt_too() -> None:
    values = processed(Sampling(repetition_penalty=2.0), [4, 5, 6])
    assert [values[i] for i in (4, 5, 6, 7)] == [0.5, 0.5, 0.5, 1.0]


def test_a_bias_is_added_and_an_unknown_token_is_refused() -> None:
    sampling = Sampling(repetition_penalty=1.0, logit_bias={"3": -100.0})
    check(sampling, VOCABULARY)
    assert processed(sampling, [1, 2])[3] == -99.0
    for name in ("50", "x", "-1", "\u0663"):
        with pytest.raises(RequestError, match="this model has tokens 0 to 49"):
            check(Sampling(logit_bias={name: 1.0}), VOCABULARY)


def test_the_rounding_of_a_forward_of_several_tokens_changes_no_seeded_draw() -> None:
    size = 151_936  # of Qwen's vocabulary
    noise = np.random.default_rng(0)
    logits = mx.array(noise.normal(0, 3, (1, size)).astype(np.float32))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    rounded = logprobs + mx.array(noise.normal(0, 5e-6, (1, size)).astype(np.float32))
    unfiltered = Sampling(temperature=1.0, top_p=1.0, min_p=0.0, top_k=0, seed=7)
    sample = make_sampling_params(unfiltered, DEFAULTS, size, prompt_length=2).sampler
    drawn = [[sample(each, [place]).item() for place in range(300)] for each in (logprobs, rounded)]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 100


@pytest.mark.parametrize(
    ("environ", "generation_config", "expected"),
    [
        ({}, {}, SamplingDefaults(0.1, 0.9, 40, 0.05)),
        ({}, {"temperature": 0.2, "top_p": 0.8}, SamplingDefaults(0.2, 0.8, 40, 0.05)),
        ({}, {"temperature": 1, "top_k": 0, "min_p": 0}, SamplingDefaults(1.0, 0.9, 0, 0.0)),
        (
            {"DEFAULT_TEMPERATURE": "0", "DEFAULT_TOP_K": "7"},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
            SamplingDefaults(0.0, 0.95, 7, 0.05),
        ),
        (
            {},
            {"temperature": "warm", "top_p": None, "top_k": 2.5, "min_p": True},
            SamplingDefaults(0.1, 0.9, 40, 0.05),
        ),
        ({}, {"temperature": 1e9, "top_p": float("nan"), "top_k": -1}, SamplingDefaults()),
        ({}, {"repetition_penalty": 1.3}, SamplingDefaults(repetition_penalty=1.0)),
    ],
)
def test_a_default_is_the_settings_then_the_makers_then_ours(
    environ: dict[str, str], generation_config: dict[str, Any], expected: SamplingDefaults
) -> None:
    assert sampling_defaults(load_settings(environ, None), generation_config) == expected
