"""Decodes answers of one model with a draft model and without."""

from collections.abc import Iterator, Sequence as TypedSequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from hearth.worker.engine.decode.decoder import Decoder, Sequence
from hearth.worker.engine.hidden_states import with_hidden
from scripts.harness.warm.token_margins import COUNTED, scaled_embeddings
from tests.helpers.models.drafted_decoding import drafted_sequence, said_by

BITS_MAX: Final = 8


@dataclass
class DraftedAnswers:
    """Answers of `tokens` tokens to one prompt, all of one model."""

    model: Any
    prompt: list[int]
    tokens: int = 40
    is_prompt_shown: bool = False  # to the draft model, as far as it is read before
    _plain: dict[str, list[int]] = field(default_factory=dict)

    def sequence(
        self,
        sampling: str,
        drafter: Any,
        key: str = "x",
        tail: int = 1,
        prompt: TypedSequence[int] = (),
    ) -> Sequence:
        """Return a prompt that was read but for its last `tail` tokens."""
        ids = list(prompt) or self.prompt
        cache = make_prompt_cache(self.model)
        hidden = None
        with mx.stream(generation_stream):
            if self.is_prompt_shown:
                _, hidden = with_hidden(self.model, mx.array(ids[:-tail])[None], cache)
            else:
                self.model(mx.array(ids[:-tail])[None], cache=cache)
            mx.eval(hidden, [layer.state for layer in cache])
        return drafted_sequence(
            cache,
            ids,
            sampling,
            drafter,
            self.tokens,
            key=key,
            tail=tail,
            draft_model=drafter.model if drafter is not None else None,
            hidden=hidden,
        )

    def decoder(self, is_mergeable: bool = False) -> Decoder:
        return Decoder(self.model, generation_stream, is_mergeable=is_mergeable)

    def plain(self, sampling: str) -> list[int]:
        """Return what is said without drafts."""
        if sampling not in self._plain:
            self._plain[sampling] = self.drafted(sampling, None)
        return self._plain[sampling]

    def drafted(self, sampling: str, drafter: Any, tail: int = 1) -> list[int]:
        decoder = self.decoder()
        decoder.add(self.sequence(sampling, drafter, tail=tail))
        return self.said_by(decoder)

    def assert_said(self, sampling: str, said: list[int]) -> None:
        """Assert that this is what is said without drafts, up to a tie.

        A tie is where a last bit of its embeddings has plain decoding say the very same token.
        """
        plain = self.plain(sampling)
        at = next((at for at in range(self.tokens) if said[at] != plain[at]), self.tokens)
        COUNTED.answers += 1
        COUNTED.tokens += min(at + 1, self.tokens)
        if at < self.tokens:
            turned = [said[: at + 1] == other[: at + 1] for other in self._rounded(sampling)]
            assert any(turned), (said, plain)
            COUNTED.ties.append(f"token {at} is {said[at]} and not {plain[at]}, {sampling}")

    def _rounded(self, sampling: str) -> Iterator[list[int]]:
        network = self.model if isinstance(self.model, nn.Module) else self.model.model
        for bits in range(-BITS_MAX, BITS_MAX + 1):
            with scaled_embeddings(network, bits):
                yield self.drafted(sampling, None)

    def said_by(self, decoder: Decoder) -> list[int]:
        return said_by(decoder, self.tokens)
