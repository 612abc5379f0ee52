"""Masks the logits of one answer so that only tokens can come that its constraints allow."""

import logging
from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np

from hearth.shared.errors import WorkerLost
from hearth.worker.constraint.grammar_client import (
    GrammarAnswer,
    GrammarEnded,
    GrammarError,
    GrammarLost,
)
from hearth.worker.constraint.llguidance_errors import error_text, explained, meaning_of
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
        answer: GrammarAnswer | None = None,  # the whole answer's; the mask advances it
        thinking: ThinkingBudget | None = None,
        banned: int | None = None,  # a token that never may come
        largest_pattern: str = "",  # of the grammar, as a sentence for the client
        counts: Counter[str] | None = None,
    ) -> None:
        self.failure = ""
        # Of HTTP: 400 where the grammar is what is wrong, 503 where the system ended its process.
        self.failure_status, self.failure_code = 500, "constraint_failed"
        self._prompt_tokens = prompt_tokens
        self._answer = answer
        self._largest_pattern = largest_pattern
        self._counts: Counter[str] = Counter() if counts is None else counts
        self._unread: list[int] = []  # tokens of the answer that the grammar has not had yet
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
            if self._answer is not None or self._thinking is not None:
                self._advance(tokens)
            return self._masked(logits)
        except (GrammarError, GrammarEnded, GrammarLost) as error:
            self._fail_by_grammar(error)
        except Exception as error:
            log.exception("a constraint broke")
            self.failure = f"{type(error).__name__}: {error}"
        return logits

    def _fail_by_grammar(self, error: GrammarError | GrammarEnded | GrammarLost) -> None:
        """Fail; a grammar that is too large to go on with is the client's to change."""
        self._counts["answers_ended"] += 1
        log.warning("a grammar ended amid its answer by %s", type(error).__name__)
        said = explained(error)
        if isinstance(error, GrammarLost):
            self.failure_status, self.failure_code = 503, WorkerLost.CODE
            said += ". That is nothing that was asked; send it again"
        elif isinstance(error, GrammarEnded):
            self.failure_status = 400
            said += f". {self._largest_pattern} Let patterns repeat less, or ask for their form in"
            said += " words"
        elif (meaning := meaning_of(error_text(error))).is_limit:
            self.failure_status = 400
            said += f". {self._largest_pattern}" if meaning.is_of_patterns else ""
        said = " ".join(said.split()).rstrip(". ")
        self.failure = f"its grammar could not go on: {said}"  # whoever tells it ends the sentence

    def _advance(self, tokens: mx.array) -> None:
        known = self._prompt_tokens + self._seen
        assert tokens.ndim == 1 and tokens.shape[0] >= known, (tokens.shape, known)
        unseen: Any = tokens[known:].tolist()
        for token in unseen:
            self._seen += 1
            if self._thinking is not None:
                self._thinking.see(token)
        self._unread += unseen

    def _masked(self, logits: mx.array) -> mx.array:
        assert logits.ndim == 2, logits.shape
        if self._thinking is not None and self._thinking.forced is not None:
            return self._only(self._thinking.forced, logits)
        if self._answer is not None:
            unread, self._unread = self._unread, []
            bits = np.frombuffer(self._answer.mask(unread), np.uint8)
            allowed = mx.array(np.unpackbits(bits, bitorder="little"))
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
