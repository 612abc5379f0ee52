"""Compiles one request's grammar, and names what of it is refused."""

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer

from hearth.shared.errors import RequestError
from hearth.worker.constraint.grammar_answer import Grammar, walk
from hearth.worker.constraint.grammar_trial import (
    GrammarEnded,
    GrammarError,
    compile_apart,
    error_text,
    explained,
    is_plain,
    matcher_of,
    meaning_of,
)
from hearth.worker.constraint.json_schemas import SchemaPattern, fault, patterns_of, widened
from hearth.worker.constraint.lark_builder import Lark

COMPILE_CPU_S: Final = 1.0  # for all that is compiled for one request
SCHEMA_BYTES_MAX: Final = 1_000_000
TRIALS_MAX: Final = 20  # processes for one request, each of which takes some 0.2 s to start
PATTERNS_TRIED: Final = 8  # of one request, before its grammar is compiled
TRIED_REPEATS: Final = 1_000  # a pattern that repeats a part less often is not tried
_OTHER_CAUSES: Final = (
    "It has too many parts, too many values to choose from, or a large multipleOf."
)


@dataclass(frozen=True, slots=True)
class NamedSchema:
    """A schema of a request, `whose` in words, `param` as the client wrote it. Immutable."""

    schema: dict[str, Any]
    whose: str
    param: str
    options: Mapping[str, bool]  # of llguidance


class GrammarBuild:
    """Compiles what one request asks for. Owner: the prompt thread.

    All that is compiled draws on one limit of time: each part that is looked at alone, so that a
    refusal can name it, and the whole. What is not plain has a process of its own before.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer,
        marks: Mapping[str, int],
        schemas: Sequence[NamedSchema],
        source_of: Callable[[Sequence[NamedSchema]], str],
    ) -> None:
        """`source_of` writes the grammar with other schemas in their places."""
        self.left_out: list[str] = []  # keywords of tools' schemas that the grammar lacks
        self.is_ended = False  # it has passed a limit
        self._held_bytes = 0  # by what was compiled last, as far as that was measured
        self._tokenizer = tokenizer
        self._left_s = COMPILE_CPU_S
        self._trials_left = TRIALS_MAX
        self._source_of = source_of
        self._marks = marks
        self._schemas = schemas
        found = [(each, pattern) for each in schemas for pattern in patterns_of(each.schema)]
        self._patterns = sorted(found, key=lambda row: -row[1].repeats)[:PATTERNS_TRIED]

    @property
    def largest_pattern(self) -> str:
        """The pattern that repeats most, as a sentence; "" where none repeats anything."""
        if not self._patterns or self._patterns[0][1].repeats <= 1:
            return ""
        schema, pattern = self._patterns[0]
        return f"The pattern that repeats most is {pattern} in the JSON schema of {schema.whose}."

    def compile(self, source: str) -> Grammar:
        """Return the grammar `source`, or what can be enforced of it.

        Raises RequestError where it cannot be compiled, allows nothing, or passes a limit.
        """
        try:
            for schema, pattern in self._patterns:
                if pattern.repeats >= TRIED_REPEATS:
                    self._try(schema, pattern)
            for schema in self._schemas:
                if not schema.options:  # what is left unenforced elsewhere is refused in these
                    self._check(schema)
            try:
                return self._grammar(source)
            except GrammarEnded:
                raise
            except GrammarError:
                # One by one they take longer than all of them together.
                source = self._source_of([self._held(schema) for schema in self._schemas])
            return self._grammar(source)
        except GrammarEnded as error:
            raise refused(
                f"The answer's grammar is too large to be compiled: {error}. "
                f"{self.largest_pattern or _OTHER_CAUSES}",
                self._schemas[-1].param if self._schemas else None,
            ) from error
        except GrammarError as error:
            raise refused(f"The answer's grammar: {explained(error)}.", None) from None

    def _grammar(self, source: str) -> Grammar:
        matcher, spent_s = self._compiled(source)
        anew = functools.partial(matcher_of, self._tokenizer, source)
        return Grammar(matcher, anew, spent_s, self.largest_pattern, self._held_bytes)

    def _compiled(self, source: str) -> tuple[LLMatcher, float]:
        """Compile a grammar; tell how much CPU time that took. Raises GrammarError."""
        try:
            if not is_plain(source):
                self._trials_left -= 1
                if self._trials_left < 0:
                    raise GrammarEnded(f"more than {TRIALS_MAX} parts of it are not plain")
                spent_s, self._held_bytes = compile_apart(source, max(self._left_s, 0.001))
                self._left_s -= spent_s
            if self._left_s <= 0:
                raise GrammarEnded(f"it takes more than {COMPILE_CPU_S:g} s of CPU time")
            began = time.thread_time()
            try:
                return matcher_of(self._tokenizer, source), time.thread_time() - began
            finally:
                self._left_s -= time.thread_time() - began
        except GrammarEnded:
            self.is_ended = True
            raise

    def _held(self, named: NamedSchema) -> NamedSchema:
        """Return what can be enforced of a tool's schema. Raises RequestError for the answer's."""
        if not named.options:
            self._check(named)
            return named
        check_size(named)
        schema, left_out = widened(
            named.schema,
            self._error_of(lambda part: self._source(part, named.options)),
            self._error_of(lambda held: self._source_of([replace(named, schema=held)])),
        )
        if self.is_ended:
            raise GrammarEnded("too much of it cannot be enforced")
        self.left_out += left_out
        return replace(named, schema=schema)

    def _try(self, schema: NamedSchema, pattern: SchemaPattern) -> None:
        """Raise RequestError where a pattern fails by itself, maybe at a later character."""
        text = {"type": "string", "pattern": pattern.pattern}
        try:
            walk(self._compiled(self._source(text, schema.options))[0], self._left_s)
        except GrammarError as error:
            is_limit = isinstance(error, GrammarEnded) or meaning_of(error_text(error)).is_limit
            if schema.options and not is_limit:
                return  # what cannot be enforced of a tool's schema is left out
            raise refused(
                f"The JSON schema of {schema.whose}: {pattern}, cannot be followed: "
                f"{error_text(error)}. Let it repeat less.",
                schema.param,
            ) from error

    def _check(self, named: NamedSchema) -> None:
        """Raise RequestError where a schema cannot be compiled, or allows no value."""
        place, said = fault(
            named.schema, self._error_of(lambda part: self._source(part, named.options))
        )
        if said:
            raise refused(f"The JSON schema of {named.whose} at {place}: {said}.", named.param)

    def _error_of(self, source_of: Callable[[Any], str]) -> Callable[[Any], str]:
        """Return what tells llguidance's words against a schema's grammar, "" without any.

        Once it has any, the limits only end the search for a smaller part.
        """
        has_error = False

        def error_of(part: Any) -> str:
            nonlocal has_error
            if has_error and self.is_ended:
                return ""
            try:
                self._compiled(source_of(part))
            except GrammarEnded:
                if not has_error:
                    raise
            except GrammarError as error:
                has_error = True
                return explained(error)
            return ""

        return error_of

    def _source(self, schema: Mapping[str, Any], options: Mapping[str, bool]) -> str:
        lark = Lark(self._marks)
        return lark.source(lark.json(schema, **options))


def check_size(named: NamedSchema) -> None:
    """Raise RequestError where a schema is too large to be looked at."""
    size = len(json.dumps(named.schema))
    if size > SCHEMA_BYTES_MAX:
        raise refused(
            f"The JSON schema of {named.whose} is {size:,} bytes; the limit is "
            f"{SCHEMA_BYTES_MAX:,}.",
            named.param,
        )


def refused(text: str, param: str | None) -> RequestError:
    """Return the refusal of a schema."""
    return RequestError(
        f"{text} Only what can be enforced is accepted; leave that out, or ask in words.",
        code="invalid_grammar",
        param=param,
    )
