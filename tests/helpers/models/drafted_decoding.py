"""Decodes one answer as "x", with drafts or without: what tests of drafts compare."""

from collections.abc import Sequence
from typing import Any, Final

from hearth.shared.wire_messages import Sampling
from hearth.worker.engine.decode.decoder import Decoder, DecodingSequence
from hearth.worker.engine.decode.sampler import SamplingDefaults, make_sampling_params
from hearth.worker.kv.layer_adapters import RewindPoint

SAMPLINGS: Final = {
    "greedy": Sampling(temperature=0.0, repetition_penalty=1.0),
    "the server's default": Sampling(seed=11),
    "hot, with penalties": Sampling(
        temperature=0.9, seed=5, presence_penalty=0.4, frequency_penalty=0.2, top_k=40, top_p=0.9
    ),
}


def any_prompt(length: int) -> list[int]:
    return [(i * 7919 + 13) % 2900 + 50 for i in range(length)]


def drafted_sequence(
    cache: list[Any],
    prompt: Sequence[int],
    sampling: str,
    drafter: Any,
    tokens_max: int,
    **more: Any,
) -> DecodingSequence:
    """Return a sequence whose `cache` has read `prompt` but for its tail, of one token at least."""
    tail: int = more.pop("tail", 1)
    return DecodingSequence(
        request_id=more.pop("key", "x"),
        cache=cache,
        tokens=list(prompt[:-tail]),
        tail=list(prompt[-tail:]),
        sampling=make_sampling_params(SAMPLINGS[sampling], SamplingDefaults(), 4000, len(prompt)),
        tokens_max=tokens_max,
        drafter=drafter,
        before_draft=lambda _rows, draft_rows: draft_rows,
        rewind_point=RewindPoint,
        **more,
    )


def said_by(decoder: Decoder, count: int) -> list[int]:
    """Step until "x" has said so many tokens; return them."""
    said: list[int] = []
    while len(said) < count:
        said += [sampled.token_id for sampled in decoder.step() if sampled.request_id == "x"]
    return said
