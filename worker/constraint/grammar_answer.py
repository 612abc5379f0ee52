"""Follows one answer through its grammar, within a limit of CPU time for each token."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from llguidance import LLMatcher

from hearth.worker.constraint.grammar_trial import GrammarEnded, GrammarError, mask_of

STEP_CPU_S: Final = 0.5  # for one step of an answer: what its tokens may save up
STEP_REFILL_CPU_S: Final = 0.02  # that each token of it adds
DRAFT_CPU_S: Final = STEP_REFILL_CPU_S  # for one look ahead, behind which the draft is cut
RENEW_CPU_S_MAX: Final = 0.25  # that a grammar may take to be compiled amid an answer
USED_CPU_S_MAX: Final = 0.1  # of its answers, behind which its lexer's states are let go
WALK_STEPS: Final = 64  # tokens of random answers with which a pattern is tried
_OF_PARSER: Final = "Parser Error"  # how llguidance begins to tell what no copy shares


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
