"""Decodes answers of one model with a draft model and without."""

from collections.abc import Sequence as TypedSequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from hearth.worker.engine.decode.decoder import Decoder, Sequence
from hearth.worker.engine.hidden_states import with_hidden
from tests.helpers.models.drafted_decoding import drafted_sequence, said_by


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

    def said_by(self, decoder: Decoder) -> list[int]:
        return said_by(decoder, self.tokens)
