"""Makes the functions that sample one request's tokens.

The filters and penalties are mlx-lm's. The seeded draw is our own.
"""

import contextlib
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from hearth.shared.errors import RequestError
from hearth.shared.settings import Settings
from hearth.shared.wire_messages import Sampling
from hearth.worker.constraint.token_mask import TokenMask

# (log probabilities (rows, vocabulary), each row's position in the answer) -> token ids (rows,).
# The draw depends on nothing else.
Sampler = Callable[[mx.array, Sequence[int]], mx.array]
Filter = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]  # (all tokens, logits) -> logits

TOP_P_MIN = 1e-6  # OpenAI allows top_p = 0, which means the likeliest token
TEMPERATURE_MIN = 1e-4  # below this logits could overflow: the likeliest token is taken
REPETITION_CONTEXT_TOKENS = 256  # the last tokens that the repetition penalty counts
ALL_GENERATED = 1 << 30  # presence and frequency penalties count all generated tokens


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The functions that sample a request's tokens.

    No function raises: an error would fail the other rows of a batch. The processors are pure
    functions. The guide has a state, which advances with each token.
    """

    sampler: Sampler
    processors: tuple[LogitsProcessor, ...]
    top_logprobs: int | None  # None = no log probabilities wanted
    guide: TokenMask | None = None  # masks the tokens that may not come; applied last


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values of sampling parameters that a request does not set. Immutable."""

    temperature: float = 0.1
    top_p: float = 0.9
    top_k: int = 40
    min_p: float = 0.05
    repetition_penalty: float = 1.0


def sampling_defaults(
    settings: Settings, generation_config: Mapping[str, Any] = {}
) -> SamplingDefaults:
    """Return the defaults of the settings. Where a setting is auto, `generation_config` decides.

    A value in `generation_config` that the setting would not accept is ignored.
    """
    parse_of = {entry.name: entry.metadata["parse"] for entry in fields(settings)}
    given = {}
    for entry in fields(SamplingDefaults):
        setting = f"default_{entry.name}"
        value = getattr(settings, setting)
        if value is None:
            with contextlib.suppress(ValueError):
                value = parse_of[setting](str(generation_config.get(entry.name, "auto")))
        if value is not None:
            given[entry.name] = value
    return SamplingDefaults(**given)


def make_sampling_params(
    sampling: Sampling,
    defaults: SamplingDefaults,
    vocab_size: int,
    prompt_length: int,
    guide: TokenMask | None = None,
) -> SamplingParams:
    """Return the sampling functions of a request that passed `check`; `defaults` fill its gaps."""
    requested = {entry.name: getattr(sampling, entry.name) for entry in fields(defaults)}
    given = {name: value for name, value in requested.items() if value is not None}
    chosen = replace(defaults, **given)
    return SamplingParams(
        sampler=_sampler(chosen, sampling.seed, vocab_size),
        processors=tuple(_processors(sampling, chosen.repetition_penalty, prompt_length)),
        top_logprobs=sampling.top_logprobs,
        guide=guide,
    )


def greedy(logprobs: mx.array, _positions: Sequence[int]) -> mx.array:
    """Choose the likeliest token of each row."""
    return mx.argmax(logprobs, axis=-1)


def check(sampling: Sampling, vocab_size: int) -> None:
    """Raise RequestError if a logit bias names a token that the model does not have."""
    for name, value in sampling.logit_bias.items():
        is_token = name.isascii() and name.isdecimal() and int(name) < vocab_size
        if not is_token or not math.isfinite(value):
            raise RequestError(
                f"logit_bias names token {name!r}; this model has tokens 0 to {vocab_size - 1:,}.",
                param="logit_bias",
            )


def _sampler(chosen: SamplingDefaults, requested_seed: int | None, vocab_size: int) -> Sampler:
    if chosen.temperature < TEMPERATURE_MIN:
        return greedy
    top_p, min_p, top_k = max(chosen.top_p, TOP_P_MIN), chosen.min_p, chosen.top_k
    filters: list[Filter] = []
    if top_p < 1:
        filters.append(lambda logprobs: apply_top_p(logprobs, top_p))
    if min_p > 0:
        filters.append(lambda logprobs: apply_min_p(logprobs, min_p))
    if 0 < top_k < vocab_size:
        filters.append(lambda logprobs: apply_top_k(logprobs, top_k))
    seed = requested_seed if requested_seed is not None else secrets.randbits(64)

    def sample(logprobs: mx.array, positions: Sequence[int]) -> mx.array:
        for keep in filters:
            logprobs = keep(logprobs)
        logprobs = logprobs * (1 / chosen.temperature)
        drawn = []
        for row, position in enumerate(positions):
            random_key = mx.random.key(_mixed(seed, position))
            row_logprobs = logprobs[row : row + 1]
            # Not `categorical`, where the last bit of any logit can change the drawn token.
            drawn.append(
                mx.argmax(
                    row_logprobs + mx.random.gumbel(row_logprobs.shape, key=random_key), axis=-1
                )
            )
        return drawn[0] if len(drawn) == 1 else mx.concatenate(drawn)

    return sample


def _mixed(seed: int, position: int) -> int:
    """Return the 64-bit random key of a position in an answer, the same on every machine.

    Source: splitmix64 (Steele, Lea, Flood 2014).
    """
    mask = (1 << 64) - 1
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _processors(sampling: Sampling, penalty: float, prompt_length: int) -> list[LogitsProcessor]:
    over_everything = make_logits_processors(
        logit_bias={int(name): bias for name, bias in sampling.logit_bias.items()} or None,
        repetition_penalty=None if penalty == 1 else penalty,
        repetition_context_size=REPETITION_CONTEXT_TOKENS,
    )
    over_the_answer = make_logits_processors(
        presence_penalty=sampling.presence_penalty or None,
        presence_context_size=ALL_GENERATED,
        frequency_penalty=sampling.frequency_penalty or None,
        frequency_context_size=ALL_GENERATED,
    )
    return [*over_everything, *(partial(_generated, p, prompt_length) for p in over_the_answer)]


def _generated(
    processor: LogitsProcessor, prompt_length: int, tokens: mx.array, logits: mx.array
) -> mx.array:
    """Apply a penalty to the generated tokens alone, not to the prompt's, as OpenAI does."""
    return processor(tokens[prompt_length:], logits)
