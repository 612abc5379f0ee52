"""Decodes answers of one model with drafts and without, and compares what is said and left."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from hearth.worker.engine.decode.decoder import Decoder, DecodingSequence
from hearth.worker.engine.decode.draft_model import with_hidden
from hearth.worker.engine.decode.tree_forward import TreeForward
from hearth.worker.kv.layer_adapters import LayerMap
from scripts.harness.warm.token_margins import COUNTED, scaled_embeddings
from tests.helpers.models.drafted_decoding import drafted_sequence, said_by

BITS_MAX: Final = 8


@dataclass(eq=False)
class DraftedAnswers:
    """Answers of `tokens` tokens to one prompt, all of one model."""

    model: Any
    prompt: list[int]
    tokens: int = 40
    is_prompt_shown: bool = False  # to the draft model, as far as it is read before
    shift: int = 0  # of positions, as if behind an image
    tree_forward: TreeForward | None = None
    _plain: dict[str, list[int]] = field(default_factory=dict)

    def forward(self, ids: Sequence[int], cache: list[Any]) -> mx.array:
        """Return the logits (n, vocabulary) of a plain forward."""
        shift = {"shift": self.shift} if self.shift else {}
        logits: mx.array = self.model(mx.array([list(ids)]), cache=cache, **shift)[0]
        return logits

    def sequence(
        self,
        sampling: str,
        drafter: Any,
        key: str = "x",
        tail: int = 1,
        prompt: Sequence[int] = (),
    ) -> DecodingSequence:
        """Return a prompt that was read but for its last `tail` tokens."""
        ids = list(prompt) or self.prompt
        cache = make_prompt_cache(self.model)
        hidden = None
        with mx.stream(generation_stream):
            if self.is_prompt_shown:
                _, hidden = with_hidden(self.model, mx.array(ids[:-tail])[None], cache)
            else:
                self.forward(ids[:-tail], cache)
            mx.eval(hidden, [layer.state for layer in cache])
        return drafted_sequence(
            cache,
            ids,
            sampling,
            drafter,
            self.tokens,
            key=key,
            tail=tail,
            shift=self.shift,
            draft_model=drafter.model if drafter is not None else None,
            hidden=hidden,
        )

    def decoder(self, is_mergeable: bool = False) -> Decoder:
        return Decoder(self.model, generation_stream, is_mergeable, self.tree_forward)

    def plain(self, sampling: str) -> list[int]:
        """Return what is said without drafts."""
        if sampling not in self._plain:
            self._plain[sampling] = self.drafted(sampling, None)
        return self._plain[sampling]

    def drafted(self, sampling: str, drafter: Any, tail: int = 1) -> list[int]:
        decoder = self.decoder()
        decoder.add(self.sequence(sampling, drafter, tail=tail))
        return said_by(decoder, self.tokens)

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

    def assert_left(self, drafter: Any, said: int, atol: float = 1e-3) -> None:
        """Assert that an answer that ends behind `said` tokens leaves them, and no more, in KV."""
        truth, decoder = self.plain("greedy"), self.decoder()
        decoder.add(self.sequence("greedy", drafter))
        returned = 0
        while returned < said:
            returned += len(decoder.step())
        left = decoder.remove("x", said)
        assert left is not None and left.tokens == [*self.prompt, *truth[:said]]
        assert LayerMap(left.cache).depth(left.cache) in (None, len(left.tokens))
        with mx.stream(generation_stream):
            logits = self.forward(truth[said : said + 1], left.cache)[-1]
            assert mx.allclose(logits, self.logits_behind(said + 1), atol=atol).item()

    @functools.cache  # noqa: B019  # of one model, which lives as long as its answers
    def logits_behind(self, said: int) -> mx.array:
        """Return the logits behind so many tokens of the plain answer, each fed by itself."""
        cache = make_prompt_cache(self.model)
        self.forward(self.prompt, cache)
        for token in self.plain("greedy")[:said]:
            logits = self.forward([token], cache)[-1]
        mx.eval(logits)
        return logits

    def said_beside_guests(
        self, drafter: Any, moves: Sequence[int], on_guest: Callable[[], None] = lambda: None
    ) -> list[int]:
        """Return what "x" says, while others come after so many steps, stay, and go."""
        decoder, said = self.decoder(is_mergeable=True), list[int]()
        decoder.add(self.sequence("greedy", drafter))

        def steps(number: int) -> None:
            for _ in range(number):
                if len(said) < self.tokens:
                    said.extend(s.token_id for s in decoder.step() if s.request_id == "x")

        for number, move in enumerate(moves):
            steps(move)
            on_guest()
            decoder.add(self.sequence("greedy", None, f"guest {number}"))
            steps(move + 1)
            decoder.remove(f"guest {number}")
        steps(self.tokens)
        return said

    def _rounded(self, sampling: str) -> Iterator[list[int]]:
        network = self.model if isinstance(self.model, nn.Module) else self.model.model
        for bits in range(-BITS_MAX, BITS_MAX + 1):
            with scaled_embeddings(network, bits):
                yield self.drafted(sampling, None)
