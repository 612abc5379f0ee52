"""Tells which tokens of a call its tool's schema forces, as the worker does."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.stream.detokenise import Vocabulary
from scripts.bench.drafts_answers import chat_tokenizer, encode
from scripts.bench.drafts_replay import TokenAnswer
from scripts.harness.model_families import family


class SchemaForced:
    """Follows the calls of one answer, from the mark that opens each (`ForcedTokens`)."""

    def __init__(self, answer: TokenAnswer) -> None:
        self._drafts = compiler().call_drafts(Constraints(), list(answer.tools))

    def take(self, tokens: Sequence[int]) -> None:
        if self._drafts is not None:
            self._drafts.take(tokens)

    def forced(self, tokens_max: int) -> list[int]:
        return self._drafts.forced(tokens_max) if self._drafts is not None else []

    def fitting(self, ahead: Sequence[int], tokens: Sequence[int]) -> tuple[int, list[int]]:
        return (
            self._drafts.fitting(ahead, tokens) if self._drafts is not None else (len(tokens), [])
        )

    def choice(self, ahead: Sequence[int]) -> Callable[[int], bool] | None:
        return self._drafts.choice(ahead) if self._drafts is not None else None


@functools.cache
def compiler() -> GrammarCompiler:
    """Return the compiler of a model whose calls are Qwen3's and whose tokens are cl100k's."""
    wrapped: Any = TokenizerWrapper(
        chat_tokenizer(),
        eos_token_ids=list(encode("<|im_end|>")),
    )
    return GrammarCompiler(
        wrapped,
        len(chat_tokenizer()),
        frozenset(encode("<|im_end|>")),
        family("qwen3").reader,
        Vocabulary(wrapped).token_bytes,
    )
