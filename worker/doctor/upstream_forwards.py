"""Runs a model's forwards as mlx-lm would, nothing of Hearth between: what checks compare with.

Owner: the inference thread.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from hearth.worker.engine.decode.sampler import Sampler

Logprobs = NDArray[np.float32]  # (tokens, vocabulary)
Forwards = Generator[None, None, "Answer"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The log probabilities that each token of an answer was chosen by."""

    logprobs: Logprobs

    @property
    def tokens(self) -> list[int]:
        """The greedy tokens."""
        return [int(token) for token in self.logprobs.argmax(axis=-1)]


class UpstreamSequence:
    """One sequence in a cache of its own. Every generator yields behind each forward."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.cache: list[Any] = make_prompt_cache(model)

    def read(self, ids: Sequence[int], ends: Sequence[int]) -> Generator[None]:
        """Feed `ids` up to the last of `ends`, a forward to each."""
        start = 0
        for end in ends:
            assert start < end <= len(ids), (start, end, len(ids))
            self._model(mx.array(list(ids[start:end]))[None], cache=self.cache)
            mx.eval([layer.state for layer in self.cache])
            mx.clear_cache()
            start = end
            yield

    def answer(self, tail: Sequence[int], count: int, forced: Sequence[int] = ()) -> Forwards:
        """Feed `tail`, then a token at a time; the tokens are greedy, or `forced`.

        The last token that is chosen is not fed.
        """
        rows: list[Logprobs] = []
        inputs = list(tail)
        for number in range(count):
            logits = self._model(mx.array(inputs)[None], cache=self.cache)[:, -1, :]
            rows.append(as_logprobs(logits))
            inputs = [forced[number] if forced else int(rows[-1].argmax())]
            yield
        return Answer(np.stack(rows))


def cold_answer(
    model: Any, ids: Sequence[int], cuts: Sequence[int], count: int, forced: Sequence[int] = ()
) -> Forwards:
    """Read a prompt in the forwards that end at `cuts`; return what is answered."""
    sequence = UpstreamSequence(model)
    yield from sequence.read(ids, cuts)
    return (yield from sequence.answer(ids[cuts[-1] if cuts else 0 :], count, forced))


def as_logprobs(logits: mx.array) -> Logprobs:
    """Return log probabilities (vocabulary,) of logits (1, vocabulary), as numbers of float32."""
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return as_numbers(logprobs)


def as_numbers(logprobs: mx.array) -> Logprobs:
    return np.array(logprobs.astype(mx.float32)).reshape(-1)


def forced_choice(tokens: Sequence[int], rows: list[Any]) -> Sampler:
    """Return a sampler that says `tokens` one after another, and the last one ever after.

    It puts the log probabilities (1, vocabulary) that it sees for each of them into `rows`.
    """

    def sample(logprobs: mx.array, places: Sequence[int]) -> mx.array:
        for row, place in enumerate(places):
            assert place == len(rows), (place, len(rows))
            rows.append(logprobs[row : row + 1])
        said = [tokens[min(place, len(tokens) - 1)] for place in places]
        return mx.array(said, dtype=mx.uint32)

    return sample
