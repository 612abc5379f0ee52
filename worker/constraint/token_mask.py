"""Masks the logits of one answer so that only tokens can come that its constraints allow."""

import logging
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher

from hearth.worker.constraint.thinking_budget import ThinkingBudget

log = logging.getLogger(__name__)

NEVER = -float("inf")


class TokenMask:
    """Leaves the sampler only the tokens that may come next.

    Invariant: it never raises, as in a batch that would break other requests' answers too. When it
    cannot go on, `failure` says why and nothing is masked any more: the sampler ends the request.
    Owner: the inference thread.
    """

    def __init__(
        self,
        prompt_tokens: int,
        matcher: LLMatcher | None = None,  # of the whole answer; the mask advances it
        thinking: ThinkingBudget | None = None,
        banned: int | None = None,  # a token that never may come
    ) -> None:
        self.failure = ""
        self._prompt_tokens = prompt_tokens
        self.matcher = matcher
        self._thinking = thinking
        self._banned = banned
        self._seen = 0  # tokens of the answer

    def process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return `logits` (1, vocabulary), -inf where a token must not follow `tokens` (n,).

        The tokens are the prompt's and the answer's; they are read where they decide anything.
        """
        if self.failure:
            return logits
        try:
            if self.matcher is not None or self._thinking is not None:
                self._advance(tokens)
            return self._masked(logits)
        except Exception as error:
            log.exception("a constraint broke")
            self.failure = f"{type(error).__name__}: {error}"
            return logits

    def _advance(self, tokens: mx.array) -> None:
        known = self._prompt_tokens + self._seen
        assert tokens.ndim == 1 and tokens.shape[0] >= known, (tokens.shape, known)
        unseen: Any = tokens[known:].tolist()
        for token in unseen:
            self._seen += 1
            if self._thinking is not None:
                self._thinking.see(token)
            # A grammar that has ended takes no token, and what follows it is the turn's end.
            if self.matcher is not None and not self.matcher.is_stopped():
                self.matcher.consume_token(token)

    def _masked(self, logits: mx.array) -> mx.array:
        assert logits.ndim == 2, logits.shape
        if self._thinking is not None and self._thinking.forced is not None:
            return self._only(self._thinking.forced, logits)
        if self.matcher is not None:
            allowed = mx.array(np.frombuffer(self.matcher.compute_logit_bias(), np.uint8))
            if self.matcher.is_error():
                raise ValueError(self.matcher.get_error())
            logits = mx.where(_fitted(allowed, logits.shape[-1]), logits, NEVER)
        for banned in (self._banned, self._thinking.banned if self._thinking is not None else None):
            if banned is not None:
                logits = mx.where(mx.arange(logits.shape[-1]) == banned, NEVER, logits)
        return logits

    def _only(self, token: int, logits: mx.array) -> mx.array:
        return mx.where(mx.arange(logits.shape[-1]) == token, logits, NEVER)


def _fitted(allowed: mx.array, width: int) -> mx.array:
    """Return which of `width` logits are allowed: none that the tokenizer has no token for."""
    missing = width - allowed.shape[0]
    return (mx.pad(allowed, (0, missing)) if missing > 0 else allowed[:width]) > 0
