"""Says which tokens a drafter is told are forced: by a tool's schema, or by lies."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.draft.draft import NO_DRAFT, Draft, Drafter
from hearth.worker.draft.forced_tokens import ForcedTokens
from hearth.worker.stream.detokenise import Vocabulary
from scripts.bench.drafts_answers import chat_tokenizer, encode
from scripts.bench.drafts_replay import TokenAnswer
from scripts.harness.model_families import family


def forced_by_schema(answer: TokenAnswer) -> ForcedTokens | None:
    """Return what follows the answer's calls, from the mark that opens each."""
    return compiler().call_drafts(Constraints(), list(answer.tools)) if answer.tools else None


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


class Lies:
    """Says of each token that another one is forced (`ForcedTokens`)."""

    def __init__(self, answer: TokenAnswer) -> None:
        self._answer = answer
        self._count = 0

    def take(self, tokens: Sequence[int]) -> None:
        self._count += len(tokens)

    def forced(self, tokens_max: int) -> list[int]:
        coming = self._answer.tokens[self._count : self._count + tokens_max]
        return [token + 1 for token in coming]

    def fitting(self, ahead: Sequence[int], tokens: Sequence[int]) -> tuple[int, list[int]]:
        return len(tokens), []

    def choice(self, ahead: Sequence[int]) -> Callable[[int], bool] | None:
        return None


class AllWrong:
    """Drafts as another drafter does, but for the tokens: no one of them ever comes (`Drafter`)."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._draft = NO_DRAFT
        self.take = drafter.take
        self.is_promising = drafter.is_promising

    def propose(self, tokens_max: int, waiting: int) -> Draft:
        self._draft = self._drafter.propose(tokens_max, waiting)
        return replace(self._draft, tokens=tuple(-2 - token for token in self._draft.tokens))

    def note(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        self._drafter.note(self._draft, accepted, rows)
