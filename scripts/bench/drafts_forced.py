"""Tells which tokens of a call its tool's schema forces, by a matcher in this process.

The worker asks a process of its own for the same; counts need none.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any, Final

import llguidance
import llguidance.hf

from scripts.bench.drafts_answers import chat_tokenizer, encode
from scripts.bench.drafts_replay import TokenAnswer

# JSON as models write it, as the worker's grammars have it.
GUIDANCE: Final = {
    "lenient": True,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


class SchemaForced:
    """Follows the calls of one answer, from the mark that opens one to the one that closes it."""

    def __init__(self, answer: TokenAnswer) -> None:
        self._grammar = _grammar(json.dumps(answer.tools)) if answer.tools else ""
        self._opens, self._closes = encode("<tool_call>")[0], encode("</tool_call>")[0]
        self._matcher: llguidance.LLMatcher | None = None  # within a call that follows the grammar

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token == self._opens and self._grammar:
                self._matcher = llguidance.LLMatcher(_ll_tokenizer(), self._grammar, log_level=0)
            elif self._matcher is not None and not self._goes_on(token):
                self._matcher = None

    def _goes_on(self, token: int) -> bool:
        assert self._matcher is not None
        return token != self._closes and bool(self._matcher.consume_token(token))

    def forced(self, tokens_max: int) -> list[int]:
        if self._matcher is None or tokens_max < 1:
            return []
        found: list[int] = self._matcher.compute_ff_tokens()
        return found[:tokens_max]


@functools.cache
def _ll_tokenizer() -> Any:
    return llguidance.hf.from_tokenizer(chat_tokenizer())


@functools.lru_cache(maxsize=64)
def _grammar(tools: str) -> str:
    """Return the grammar of what stands between the marks of a call of one of the tools."""
    functions = [tool["function"] for tool in json.loads(tools)]
    lines = ["start: " + " | ".join(f"t{number}" for number in range(len(functions)))]
    for number, function in enumerate(functions):
        head = json.dumps('\n{"name": "' + function["name"] + '", "arguments": ')
        schema = {**(function.get("parameters") or {"type": "object"}), "x-guidance": GUIDANCE}
        closes = f"<[{encode('</tool_call>')[0]}]>"
        lines.append(f't{number}: {head} a{number} "}}\\n" {closes}')
        lines.append(f"a{number}: %json {json.dumps(schema)}")
    compiled: str = llguidance.LLMatcher.grammar_from_lark("\n".join(lines))
    return compiled
