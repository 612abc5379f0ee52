"""Compiles one request's grammar, names what of it is refused, and follows answers through it.

Each request has a limit of CPU time, and each token of an answer.
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
from hearth.worker.constraint.json_schemas import SchemaPattern, fault, patterns_of, widened

STEP_CPU_S: Final = 0.5  # for one step of an answer: what its tokens may save up
STEP_REFILL_CPU_S: Final = 0.02  # that each token of it adds
DRAFT_CPU_S: Final = STEP_REFILL_CPU_S  # for one look ahead, behind which the draft is cut
RENEW_CPU_S_MAX: Final = 0.25  # that a grammar may take to be compiled amid an answer
USED_CPU_S_MAX: Final = 0.1  # of its answers, behind which its lexer's states are let go
WALK_STEPS: Final = 64  # tokens of random answers with which a pattern is tried
_OF_PARSER: Final = "Parser Error"  # how llguidance begins to tell what no copy shares
COMPILE_CPU_S: Final = 1.0  # for all that is compiled for one request
SCHEMA_BYTES_MAX: Final = 1_000_000
TRIALS_MAX: Final = 20  # processes for one request, each of which takes some 0.2 s to start
PATTERNS_TRIED: Final = 8  # of one request, before its grammar is compiled
TRIED_REPEATS: Final = 1_000  # a pattern that repeats a part less often is not tried
_OTHER_CAUSES: Final = (
    "It has too many parts, too many values to choose from, or a large multipleOf."
)


@dataclass(slots=True)
class Grammar:
    """A compiled grammar, whose answers share one lexer. `matcher` stays where answers begin."""

    matcher: LLMatcher
    compile: Callable[[], LLMatcher]  # it anew. Raises GrammarError
    compile_s: float  # that this takes, of CPU time
    largest_pattern: str  # a sentence for the client
    held_bytes: int  # as far as that was measured
    used_s: float = 0.0  # of CPU time, by its answers
    is_broken: bool = False  # for an answer at least: the lexer may be
    used_at: float = 0.0  # when an answer last began

    @property
    def is_renewable(self) -> bool:
        """Whether an answer under way may have it compiled anew."""
        return self.compile_s <= RENEW_CPU_S_MAX

    @property
    def is_spent(self) -> bool:
        """Whether the next answer should have another lexer.

        This one may be broken or have grown large, or its answers could have no other later on.
        """
        return self.is_broken or self.used_s > USED_CPU_S_MAX or not self.is_renewable


class GrammarAnswer:
    """One answer's place in a grammar. Owner: the inference thread.

    Invariant: neither another answer of the grammar nor a look ahead ends an answer: llguidance's
    copies share a lexer, and what it fails by. A matcher that fails is replaced once, by one with a
    lexer of its own that is told the same tokens, and from then on nothing is looked at ahead.
    Where a grammar takes long to compile, each answer has its own lexer and looks ahead nowhere.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._is_renewable = grammar.is_renewable
        self._mask: bytes | None = None  # behind all tokens; None = not asked for yet
        self._tokens: list[int] = []
        self._left_s = self._ahead_left_s = STEP_CPU_S  # looks ahead shorten no step's time

    def mask(self, tokens: Sequence[int]) -> bytes:
        """Return which token may come behind `tokens`, those since the last call of any method.

        Raises GrammarError, as all methods do.
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
        """Return `mask(tokens)`, and those behind each part of `draft` that may come then.

        They are no more than the draft's tokens and one; the draft is not taken. A copy looks
        ahead: llguidance's rollback leaves rows behind that give a wrong mask later.
        """
        masks = [self.mask(tokens)]
        if draft and self._may_look_ahead():
            walk, began = self._matcher.deep_copy(), time.thread_time()
            for token in draft:
                place, bit = divmod(token, 8)
                may_come = place < len(masks[-1]) and masks[-1][place] >> bit & 1
                if not may_come or time.thread_time() - began > DRAFT_CPU_S:
                    break
                _consume(walk, token)
                mask = walk.compute_bitmask()
                if walk.is_error():
                    self._renew(walk)
                    break
                masks.append(mask)
            self._ahead_left_s -= time.thread_time() - began
        return masks

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that have to come behind `tokens`, those since the last call.

        A text that is forced is told in the tokens that its tokenizer reads it as.
        """
        self._take(tokens)
        if not self._may_look_ahead():
            return []
        walk, began = self._matcher.deep_copy(), time.thread_time()
        forced = walk.compute_ff_tokens()
        self._ahead_left_s -= time.thread_time() - began
        if walk.is_error():
            self._renew(walk)
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
        """Charge what is done within to the answer. Raises GrammarEnded where nothing is left."""
        began = time.thread_time()
        yield
        spent_s = time.thread_time() - began
        self._left_s -= spent_s
        self.grammar.used_s += spent_s
        if self._left_s < 0:
            raise GrammarEnded(f"a token of it takes more than {STEP_CPU_S:g} s of CPU time")

    def _renew(self, failed: LLMatcher) -> None:
        """Go on with a lexer of its own where what failed, this answer or a copy, may be the lexer.

        Raises GrammarError where it may not, or had one.
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
    """Write random answers with a grammar, as some fail at a later token; it has a lexer less then.

    Raises GrammarError; and GrammarEnded where it takes more than `cpu_s` of CPU time.
    """
    dice, began, answer = random.Random(0), time.thread_time(), matcher.deep_copy()
    for _ in range(WALK_STEPS):
        mask = mask_of(answer)
        bits, start = int.from_bytes(mask, "little"), dice.randrange(len(mask) * 8)
        rest = bits >> start << start or bits  # from a random bit on
        answer.consume_token((rest & -rest).bit_length() - 1)
        if answer.is_stopped() and not answer.is_error():
            answer = matcher.deep_copy()
        if time.thread_time() - began > cpu_s:
            raise GrammarEnded(f"random answers with it take more than {cpu_s:.2g} s of CPU time")
    mask_of(answer)


def _consume(matcher: LLMatcher, token: int) -> None:
    """Go on by a token. A grammar that has ended takes none: what follows is the turn's end."""
    if not matcher.is_stopped():
        matcher.consume_token(token)


# ---------------------------------------------------------------- what is compiled


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
