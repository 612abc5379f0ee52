"""Compiles one request's grammar, names a refused part, and follows answers through the grammar.

Each request has a limit of CPU time, and so has each token of an answer.
"""

import contextlib
import functools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer

from hearth.shared.errors import RequestError
from hearth.worker.constraint.call_grammars import Lark
from hearth.worker.constraint.grammar_trial import (
    GrammarEnded,
    GrammarError,
    compile_apart,
    error_text,
    explained,
    is_plain,
    mask_of,
    matcher_of,
    meaning_of,
)
from hearth.worker.constraint.json_schemas import SchemaPattern, find_fault, patterns_of, widened

STEP_CPU_S: Final = 0.5  # CPU time of one step of an answer, and the most that is saved up
STEP_REFILL_CPU_S: Final = 0.02  # added by each token of an answer
DRAFT_CPU_S: Final = STEP_REFILL_CPU_S  # CPU time to check one draft; the rest of the draft is cut
RENEW_CPU_S_MAX: Final = 0.25  # CPU time to compile a grammar again during an answer
USED_CPU_S_MAX: Final = 0.1  # CPU time of a lexer, after which the next answer gets a new one
WALK_STEPS: Final = 64  # tokens of random answers that try a pattern
_OF_PARSER: Final = "Parser Error"  # beginning of llguidance's errors that concern one copy alone
COMPILE_CPU_S: Final = 1.0  # CPU time for everything compiled for one request
SCHEMA_BYTES_MAX: Final = 1_000_000
TRIALS_MAX: Final = 20  # processes for one request; each takes some 0.2 s to start
PATTERNS_TRIED: Final = 8  # patterns of one request tried before its grammar is compiled
TRIED_REPEATS: Final = 1_000  # a pattern with fewer repeats of a part is not tried
_OTHER_CAUSES: Final = (
    "It has too many parts, too many values to choose from, or a large multipleOf."
)


@dataclass(slots=True)
class Grammar:
    """A compiled grammar. Its answers share one lexer; `matcher` stays at the beginning."""

    matcher: LLMatcher
    compile: Callable[[], LLMatcher]  # compiles the grammar again. Raises GrammarError
    compile_s: float  # CPU time of one compilation
    largest_pattern: str  # a sentence for the client
    held_bytes: int  # memory of the grammar, 0 if it was not measured
    used_s: float = 0.0  # CPU time of its answers
    is_broken: bool = False  # an answer failed, maybe by the shared lexer
    used_at: float = 0.0  # time at which the last answer began

    @property
    def is_renewable(self) -> bool:
        """Whether the grammar may be compiled again during an answer."""
        return self.compile_s <= RENEW_CPU_S_MAX

    @property
    def is_spent(self) -> bool:
        """Whether the next answer should get a new lexer.

        That is so if this lexer may be broken or large, or if answers could not renew it later.
        """
        return self.is_broken or self.used_s > USED_CPU_S_MAX or not self.is_renewable


class GrammarAnswer:
    """One answer's position in a grammar. Owner: the inference thread.

    Invariant: no other answer of the grammar and no look ahead can end this answer, although
    llguidance's copies share a lexer and its failures. A matcher that fails is replaced once: the
    new matcher has its own lexer and gets the same tokens, and the answer looks ahead no more. If a
    grammar takes long to compile, each answer has its own lexer from the beginning and never looks
    ahead.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._is_renewable = grammar.is_renewable
        self._mask: bytes | None = None  # mask after all tokens; None = not computed yet
        self._tokens: list[int] = []
        self._left_s = self._ahead_left_s = STEP_CPU_S  # looking ahead has a budget of its own

    def mask(self, tokens: Sequence[int]) -> bytes:
        """Return the mask of tokens that may come after `tokens`.

        `tokens` are the tokens since the last call of any method. All methods raise GrammarError.
        """
        self._take(tokens)
        while self._mask is None:
            with self._charged():
                mask = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                self._renew(self._matcher)
            else:
                self._mask = mask
        return self._mask

    def masks(self, tokens: Sequence[int], draft: Sequence[int]) -> list[bytes]:
        """Return `mask(tokens)`, and the masks after each token of `draft` that may come.

        There is at most one mask more than the draft has tokens. The draft is not added to the
        answer. A copy looks ahead, because llguidance's rollback leaves a state with wrong masks
        later.
        """
        masks = [self.mask(tokens)]
        if draft and self._may_look_ahead():
            lookahead, began = self._matcher.deep_copy(), time.thread_time()
            for token in draft:
                byte, bit = divmod(token, 8)
                may_come = byte < len(masks[-1]) and masks[-1][byte] >> bit & 1
                if not may_come or time.thread_time() - began > DRAFT_CPU_S:
                    break
                _consume(lookahead, token)
                mask = lookahead.compute_bitmask()
                if lookahead.is_error():
                    self._renew(lookahead)
                    break
                masks.append(mask)
            self._ahead_left_s -= time.thread_time() - began
        return masks

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that have to come after `tokens`, the tokens since the last call.

        A forced text is returned in the tokens that the tokenizer makes of it.
        """
        self._take(tokens)
        if not self._may_look_ahead():
            return []
        lookahead, began = self._matcher.deep_copy(), time.thread_time()
        forced = lookahead.compute_ff_tokens()
        self._ahead_left_s -= time.thread_time() - began
        if lookahead.is_error():
            self._renew(lookahead)
        return forced

    def _may_look_ahead(self) -> bool:
        return self._is_renewable and self._ahead_left_s >= STEP_CPU_S / 2

    def _take(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._tokens += tokens
            self._mask = None
            refill = STEP_REFILL_CPU_S * len(tokens)
            self._left_s = min(self._left_s + refill, STEP_CPU_S)
            self._ahead_left_s = min(self._ahead_left_s + refill, STEP_CPU_S)
            with self._charged():
                for token in tokens:
                    _consume(self._matcher, token)

    @contextlib.contextmanager
    def _charged(self) -> Iterator[None]:
        """Charge the CPU time of the block to the answer. Raises GrammarEnded if none is left."""
        began = time.thread_time()
        yield
        spent_s = time.thread_time() - began
        self._left_s -= spent_s
        self.grammar.used_s += spent_s
        if self._left_s < 0:
            raise GrammarEnded(f"a token of it takes more than {STEP_CPU_S:g} s of CPU time")

    def _renew(self, failed: LLMatcher) -> None:
        """Go on with a new lexer after a failure of this answer or of its copy.

        Raises GrammarError if the lexer cannot be the cause, or if the answer has its own lexer.
        """
        error = failed.get_error()
        is_of_parser = error.startswith(_OF_PARSER)
        if is_of_parser and failed is not self._matcher:
            return
        self.grammar.is_broken |= not is_of_parser
        if is_of_parser or not self._is_renewable:
            raise GrammarError(error)
        self._is_renewable = False
        self._matcher = self.grammar.compile()
        for token in self._tokens:
            _consume(self._matcher, token)


def walk(matcher: LLMatcher, cpu_s: float) -> None:
    """Write random answers with a grammar, because some grammars fail at a later token.

    The lexer of `matcher` is used up. Raises GrammarError, and GrammarEnded if the walk takes more
    than `cpu_s` of CPU time.
    """
    dice, began, answer = random.Random(0), time.thread_time(), matcher.deep_copy()
    for _ in range(WALK_STEPS):
        mask = mask_of(answer)
        bits, start = int.from_bytes(mask, "little"), dice.randrange(len(mask) * 8)
        rest = bits >> start << start or bits  # the bits from a random bit on
        answer.consume_token((rest & -rest).bit_length() - 1)
        if answer.is_stopped() and not answer.is_error():
            answer = matcher.deep_copy()
        if time.thread_time() - began > cpu_s:
            raise GrammarEnded(f"random answers with it take more than {cpu_s:.2g} s of CPU time")
    mask_of(answer)


def _consume(matcher: LLMatcher, token: int) -> None:
    """Consume a token. A grammar that has ended takes no token: the turn ends there."""
    if not matcher.is_stopped():
        matcher.consume_token(token)


# ---------------------------------------------------------------- compiling


@dataclass(frozen=True, slots=True)
class NamedSchema:
    """A schema of a request. Immutable."""

    schema: dict[str, Any]
    subject: str  # what the schema describes, in words
    param: str  # the request's parameter that holds the schema
    options: Mapping[str, bool]  # options of llguidance


class GrammarBuild:
    """Compiles the grammar of one request. Owner: the prompt thread.

    One limit of CPU time holds for the whole grammar and for all parts that are compiled alone, so
    that a refusal can name a part. A grammar that is not plain is compiled in another process
    first.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer,
        marks: Mapping[str, int],
        schemas: Sequence[NamedSchema],
        source_of: Callable[[Sequence[NamedSchema]], str],
    ) -> None:
        """`source_of` writes the grammar with other schemas in place of `schemas`."""
        self.left_out: list[str] = []  # keywords of tools' schemas that the grammar lacks
        self.is_ended = False  # a limit was passed
        self._held_bytes = 0  # memory of the last compiled grammar, 0 if it was not measured
        self._tokenizer = tokenizer
        self._left_s = COMPILE_CPU_S
        self._trials_left = TRIALS_MAX
        self._source_of = source_of
        self._marks = marks
        self._schemas = schemas
        found = [(named, pattern) for named in schemas for pattern in patterns_of(named.schema)]
        self._patterns = sorted(found, key=lambda pair: -pair[1].repeats)[:PATTERNS_TRIED]

    @property
    def largest_pattern(self) -> str:
        """A sentence about the pattern that repeats most; "" if no pattern repeats a part."""
        if not self._patterns or self._patterns[0][1].repeats <= 1:
            return ""
        schema, pattern = self._patterns[0]
        return f"The pattern that repeats most is {pattern} in the JSON schema of {schema.subject}."

    def compile(self, source: str) -> Grammar:
        """Return the compiled grammar `source`, or the part of it that can be enforced.

        Raises RequestError if it cannot be compiled, allows no answer, or passes a limit.
        """
        try:
            for schema, pattern in self._patterns:
                if pattern.repeats >= TRIED_REPEATS:
                    self._try_pattern(schema, pattern)
            for schema in self._schemas:
                if not schema.options:  # such a schema is refused if a part cannot be enforced
                    self._check(schema)
            try:
                return self._grammar(source)
            except GrammarEnded:
                raise
            except GrammarError:
                # Schemas are checked one by one only now: that takes longer than all together.
                source = self._source_of([self._enforceable(schema) for schema in self._schemas])
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
        compile_again = functools.partial(matcher_of, self._tokenizer, source)
        return Grammar(matcher, compile_again, spent_s, self.largest_pattern, self._held_bytes)

    def _compiled(self, source: str) -> tuple[LLMatcher, float]:
        """Compile a grammar; return the matcher and the CPU time. Raises GrammarError."""
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

    def _enforceable(self, named: NamedSchema) -> NamedSchema:
        """Return a tool's schema without what cannot be enforced.

        Raises RequestError if a part of the answer's own schema cannot be enforced.
        """
        if not named.options:
            self._check(named)
            return named
        check_size(named)
        schema, left_out = widened(
            named.schema,
            self._error_of(lambda part: self._source(part, named.options)),
            self._error_of(lambda whole: self._source_of([replace(named, schema=whole)])),
        )
        if self.is_ended:
            raise GrammarEnded("too much of it cannot be enforced")
        self.left_out += left_out
        return replace(named, schema=schema)

    def _try_pattern(self, schema: NamedSchema, pattern: SchemaPattern) -> None:
        """Raise RequestError if a pattern fails on its own, maybe at a later character."""
        text = {"type": "string", "pattern": pattern.pattern}
        try:
            walk(self._compiled(self._source(text, schema.options))[0], self._left_s)
        except GrammarError as error:
            is_limit = isinstance(error, GrammarEnded) or meaning_of(error_text(error)).is_limit
            if schema.options and not is_limit:
                return  # the pattern is left out of a tool's schema
            raise refused(
                f"The JSON schema of {schema.subject}: {pattern}, cannot be followed: "
                f"{error_text(error)}. Let it repeat less.",
                schema.param,
            ) from error

    def _check(self, named: NamedSchema) -> None:
        """Raise RequestError if a schema cannot be compiled, or allows no value."""
        pointer, error = find_fault(
            named.schema, self._error_of(lambda part: self._source(part, named.options))
        )
        if error:
            raise refused(f"The JSON schema of {named.subject} at {pointer}: {error}.", named.param)

    def _error_of(self, source_of: Callable[[Any], str]) -> Callable[[Any], str]:
        """Return a function that compiles a schema and returns llguidance's error, or "".

        After the first error, passing a limit only ends the search for a smaller part.
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
    """Raise RequestError if a schema is too large."""
    size = len(json.dumps(named.schema))
    if size > SCHEMA_BYTES_MAX:
        raise refused(
            f"The JSON schema of {named.subject} is {size:,} bytes; the limit is "
            f"{SCHEMA_BYTES_MAX:,}.",
            named.param,
        )


def refused(text: str, param: str | None) -> RequestError:
    """Return the error that refuses a schema."""
    return RequestError(
        f"{text} Only what can be enforced is accepted; leave that out, or ask in words.",
        code="invalid_grammar",
        param=param,
    )
