"""Checks what a token mask tells of tokens that may come, and that it is as before behind it."""

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from llguidance import LLParserLimits

from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint import compiled_grammar, grammar_trial
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.constraint.token_mask import TokenMask
from scripts.fixtures import checkpoint_files
from scripts.harness.constrained_answers import constrainer_for, tool
from scripts.harness.model_families import family

WIDTH = checkpoint_files.VOCAB_SIZE
FIXED = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}}
PLACE = Constraints(is_json=True, schema=FIXED | {"required": ["place"]})
TEXT = {"type": "string", "pattern": "^(q{1,40}|z{1,50}|[a-z]{1,60})*$"}
WORDS = Constraints(
    is_json=True,
    schema={"type": "object", "properties": {"words": TEXT}, "required": ["words"]},
)
LONG_TEXT = Constraints(
    is_json=True,
    schema={"type": "object", "properties": {"words": {"type": "string", "maxLength": 90_000}}},
)
# Its 900 optional properties end an answer behind the beginning of a name.
MANY = {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n}}}$"} for n in range(900)}
BREAKING = Constraints(
    is_json=True,
    schema={"type": "object", "properties": MANY, "additionalProperties": False},
)
CALL = tool("grep", {"properties": {"pattern": {"type": "string"}}, "required": ["pattern"]})


@pytest.fixture
def compiler() -> GrammarCompiler:
    return constrainer_for(family("qwen3"))


def mask_of(compiler: GrammarCompiler, constraints: Constraints, opening: str = "") -> TokenMask:
    mask = compiler.token_mask(constraints, [CALL], opening, 0)
    assert mask is not None
    return mask


def tokens_of(text: str) -> list[int]:
    return list(family("qwen3").tokenizer.encode(text, add_special_tokens=False))


def text_of(tokens: list[int]) -> str:
    return str(family("qwen3").tokenizer.decode(tokens))


def zeros(rows: int = 1) -> mx.array:
    return mx.zeros((rows, WIDTH))


def may_come(mask: TokenMask, said: list[int]) -> set[int]:
    row = mask.process(mx.array([0, *said])[1:], zeros())
    return {int(n) for n in np.flatnonzero(np.array(row[0]) == 0)}


def test_forced_tokens_are_those_of_the_schema_up_to_the_first_choice(
    compiler: GrammarCompiler,
) -> None:
    mask = mask_of(compiler, PLACE)
    assert mask.forced(99) == [], "it may think first"
    mask.take(tokens_of("{"))
    forced = mask.forced(99)
    assert text_of(forced) == '"place":'
    assert mask.forced(2) == forced[:2]
    mask.take(tokens_of('"place": "Ro'))
    assert text_of(mask.forced(99)) == "me", "more may follow it"


def test_forced_tokens_end_a_think_block_whose_budget_is_spent(compiler: GrammarCompiler) -> None:
    closing = Constraints(is_json=True, schema=FIXED, thinking_budget=1)
    mask = mask_of(compiler, closing, "<think>\n")
    assert mask.forced(99) == []
    mask.take(tokens_of("a"))
    assert text_of(mask.forced(99)).strip() == "</think>"
    assert mask.forced(1) == mask.forced(99)[:1]


def test_a_token_beyond_the_vocabulary_never_fits(compiler: GrammarCompiler) -> None:
    assert mask_of(compiler, PLACE).fitting([1 << 30]) == 0


def test_drafts_that_are_never_said_run_out_of_time_and_take_none_from_the_answer(
    compiler: GrammarCompiler,
) -> None:
    mask, said = mask_of(compiler, WORDS), tokens_of('{"words": "')
    mask.take(said)
    drafts = [tokens_of(letter * 9) for letter in "qz"]
    asked = 0
    while mask.fitting(drafts[asked % 2]):
        asked += 1
        assert asked < 100_000, "looking ahead is not bounded"
    assert asked > 10
    assert mask.forced(9) == []
    assert mask.failure == ""
    assert may_come(mask, said) == may_come(mask_of(compiler, WORDS), said)
    mask.take(drafts[0])
    assert mask.fitting(drafts[1]) > 0, "what is said refills it"


# ---------------------------------------------------------------- failures


def test_a_draft_that_breaks_its_grammar_ends_no_answer(compiler: GrammarCompiler) -> None:
    mask, plain = mask_of(compiler, BREAKING), mask_of(compiler, BREAKING)
    begun, draft = may_come(plain, []), tokens_of('{"p1')
    may_come(plain, draft[:1])
    assert plain.failure, "it breaks where that is said"
    assert mask.fitting(draft) < len(draft)
    assert mask.failure == ""
    assert may_come(mask, []) == begun
    assert mask.fitting(draft) == 0, "nothing is known behind what breaks it"
    assert mask.forced(99) == []
    assert mask.failure == ""


def test_an_answer_whose_lexer_another_one_breaks_goes_on(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of a grammar share its lexer, and what that fails by."""
    monkeypatch.setattr(grammar_trial, "LIMITS", LLParserLimits(max_lexer_states=2_000))
    other, mask = mask_of(compiler, LONG_TEXT), mask_of(compiler, LONG_TEXT)
    said, written = tokens_of('{"words": "qq'), tokens_of('{"words": "')
    expected = may_come(mask_of(constrainer_for(family("qwen3")), LONG_TEXT), said)
    mask.take(said[:-1])
    while not other.failure:
        assert len(written) < 5_000, "its lexer has no limit"
        written += tokens_of("q")
        other.process(mx.array(written), zeros())
    assert other.failure_status == 400 and "atterns repeat less" in other.failure
    assert may_come(mask, said) == expected
    assert mask.fitting(tokens_of("q")) == 0, "nothing more is looked at ahead"
    assert may_come(mask_of(compiler, LONG_TEXT), said) == expected


@pytest.mark.parametrize("act", ["process", "fitting", "forced", "process_rows"])
def test_an_answer_whose_token_takes_long_ends_with_a_400(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    mask, said = mask_of(compiler, PLACE), tokens_of('{"place": "')
    mask.fitting(said)
    clock = itertools.count()
    monkeypatch.setattr(compiled_grammar.time, "thread_time", lambda: float(next(clock)))
    given = zeros(2)
    if act != "process":
        mask.take(said)
    found: Any = {
        "process": lambda: mask.process(mx.array(said), given),
        "fitting": lambda: mask.fitting([7]),
        "forced": lambda: mask.forced(9),
        "process_rows": lambda: mask.process_rows([7], given),
    }[act]()
    assert not found if act in ("fitting", "forced") else found is given
    assert mask.failure_status == 400
    assert "a token of it takes more than 0.5 s of CPU time" in mask.failure
    assert mask.fitting([7]) == 0
    assert mask.process_rows([7], given) is given
    assert mask.process(mx.array(said), zeros()).shape == (1, WIDTH)


def test_a_wrong_number_of_rows_fails_its_own_answer_alone(compiler: GrammarCompiler) -> None:
    mask, given = mask_of(compiler, PLACE), zeros(7)
    assert mask.process_rows([1], given) is given
    assert mask.failure
