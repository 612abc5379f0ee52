"""Checks what a token mask tells of tokens that may come, and that it is as before behind it."""

import signal
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest

from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.constraint.token_mask import TokenMask
from scripts.fixtures import checkpoint_files
from scripts.harness.constrained_answers import constrainer_for, tool
from scripts.harness.model_families import family

pytestmark = pytest.mark.process

WIDTH = checkpoint_files.VOCAB_SIZE
MODULE = "hearth.worker.constraint.grammar_process"
FIXED = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}}
PLACE = Constraints(is_json=True, schema=FIXED | {"required": ["place"]})
TEXT = {"type": "string", "pattern": "^(q{1,40}|z{1,50}|[a-z]{1,60})*$"}
WORDS = Constraints(
    is_json=True,
    schema={"type": "object", "properties": {"words": TEXT}, "required": ["words"]},
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


def test_an_answer_that_is_complete_has_no_forced_tokens(compiler: GrammarCompiler) -> None:
    mask = mask_of(compiler, PLACE)
    mask.take(tokens_of('{"place": "Rome"}'))
    assert mask.forced(99) == []
    assert mask.failure == ""


def test_forced_tokens_end_a_think_block_whose_budget_is_spent(compiler: GrammarCompiler) -> None:
    closing = Constraints(is_json=True, schema=FIXED, thinking_budget=1)
    mask = mask_of(compiler, closing, "<think>\n")
    assert mask.forced(99) == []
    mask.take(tokens_of("a"))
    assert text_of(mask.forced(99)).strip() == "</think>"
    assert mask.forced(1) == mask.forced(99)[:1]


def test_a_draft_fits_up_to_the_first_token_that_may_not_come(compiler: GrammarCompiler) -> None:
    mask = mask_of(compiler, PLACE)
    right = tokens_of('{"place": "Rome"}')
    assert mask.fitting(right) == len(right)
    assert mask.fitting([]) == 0
    assert mask.fitting([right[0], right[0], *right[1:]]) == 1
    end = min(compiler.end_ids)
    assert mask.fitting([*right, end, end]) == len(right) + 2, "the turn's end follows its end"
    assert mask.fitting([*right, right[0]]) == len(right)


def test_a_token_beyond_the_vocabulary_never_fits(compiler: GrammarCompiler) -> None:
    assert mask_of(compiler, PLACE).fitting([1 << 30]) == 0


def test_a_drafts_rows_are_masked_each_behind_what_stands_in_front(
    compiler: GrammarCompiler,
) -> None:
    mask, said = mask_of(compiler, PLACE), tokens_of('{"place": "')
    mask.take(said)
    draft = [*tokens_of("Ro"), 0, 0]
    rows = np.array(mask.process_rows(draft, zeros(5)))
    for n in range(2):
        allowed = may_come(mask_of(compiler, PLACE), [*said, *draft[:n]])
        assert {int(token) for token in np.flatnonzero(rows[n] == 0)} == allowed
    fits = mask.fitting(draft)
    assert fits == len(tokens_of("Ro"))
    assert not np.any(rows[fits + 1 :]), "behind a token that does not fit nothing is masked"
    assert may_come(mask, said) == may_come(mask_of(compiler, PLACE), said), "nothing was taken"


def test_tokens_that_were_taken_are_not_read_again(compiler: GrammarCompiler) -> None:
    mask, said = mask_of(compiler, PLACE), tokens_of('{"place": "')
    mask.take(said[:2])
    mask.take(said[2:])
    more = [*said, *tokens_of("Oslo")]
    assert may_come(mask, more) == may_come(mask_of(compiler, PLACE), more)


def test_a_draft_has_no_token_that_the_budget_forbids(compiler: GrammarCompiler) -> None:
    thinking = mask_of(compiler, Constraints(thinking_budget=2), "<think>\n")
    closing = [*tokens_of("a"), *tokens_of("b")]
    assert thinking.fitting([*closing, *closing]) == 2
    thinking.take(closing)
    assert thinking.fitting(thinking.forced(99)) == len(thinking.forced(99))
    rows = np.array(thinking.process_rows(thinking.forced(1), zeros(2)))
    assert np.count_nonzero(rows[0] == 0) == 1


def test_a_banned_token_does_not_fit(compiler: GrammarCompiler) -> None:
    mask = mask_of(compiler, Constraints(tool_choice="none"))
    (call,) = tokens_of("<tool_call>")
    assert mask.fitting([7, call, 7]) == 1
    rows = np.array(mask.process_rows([7], zeros(2)))
    assert np.all(rows[:, call] == -np.inf)
    assert np.count_nonzero(rows) == 2


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
    assert mask.fitting(draft) == 0, "nothing more is looked at ahead"
    assert mask.forced(99) == []


def end_answer(how: signal.Signals) -> None:
    """Send a signal to the process that began last: an answer's, where it has just been asked."""
    everyone = psutil.Process().children(recursive=True)
    found = [each for each in everyone if each.status() != psutil.STATUS_ZOMBIE]
    # Times of creation have steps of 10 ms, in which several begin.
    answer = max(found, key=lambda each: (each.create_time(), each.pid))
    assert MODULE in answer.cmdline()
    answer.send_signal(how)
    answer.wait(60)


def test_an_answer_whose_process_ends_behind_a_draft_goes_on_in_another(
    compiler: GrammarCompiler,
) -> None:
    """What looking ahead took may be what ended it."""
    mask, said = mask_of(compiler, PLACE), tokens_of('{"place": "')
    expected = may_come(mask_of(compiler, PLACE), said)
    assert mask.fitting(said) == len(said)
    end_answer(signal.SIGPROF)
    assert may_come(mask, said) == expected
    assert mask.fitting(tokens_of("Rome")) == 0
    end_answer(signal.SIGPROF)
    mask.take(tokens_of("Rome"))
    assert mask.fitting(tokens_of('"}')) == 0
    assert mask.failure_status == 400
    assert "CPU time" in mask.failure


@pytest.mark.parametrize("act", ["fitting", "forced", "process_rows"])
def test_an_answer_whose_process_was_killed_fails_with_a_503(
    compiler: GrammarCompiler, act: str
) -> None:
    mask, said = mask_of(compiler, PLACE), tokens_of('{"place": "')
    mask.fitting(said)
    end_answer(signal.SIGKILL)
    mask.take(said)
    given = zeros(2)
    found: Any = {
        "fitting": lambda: mask.fitting([7]),
        "forced": lambda: mask.forced(9),
        "process_rows": lambda: mask.process_rows([7], given),
    }[act]()
    assert found is given if act == "process_rows" else not found
    assert mask.failure_status == 503
    assert mask.fitting([7]) == 0
    assert mask.process_rows([7], given) is given
    assert mask.process(mx.array(said), zeros()).shape == (1, WIDTH)


def test_a_wrong_number_of_rows_fails_its_own_answer_alone(compiler: GrammarCompiler) -> None:
    mask, given = mask_of(compiler, PLACE), zeros(7)
    assert mask.process_rows([1], given) is given
    assert mask.failure
