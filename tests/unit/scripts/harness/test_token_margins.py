"""Two answers may part where a last bit decides, and nowhere else."""

from dataclasses import replace

import numpy as np
import pytest

from scripts.harness.socketless_worker import Answer, machine
from scripts.harness.warm.token_margins import (
    BITS,
    COUNTED,
    ROUNDED_MORE,
    measured,
    read,
    same_tokens,
)

PROMPT = [(i * 7919 + 13) % 2900 + 50 for i in range(40)]
AT = 3


def parted(cold: Answer, moved: float) -> Answer:
    """Return `cold` with another token at AT, and its row as far off as `moved`."""
    row = cold.logits[AT].copy()
    row[cold.tokens[AT]] -= moved
    tokens = [*cold.tokens[:AT], int(np.argsort(row)[-2]), *cold.tokens[AT + 1 :]]
    return replace(cold, tokens=tokens, logits=[*cold.logits[:AT], row, *cold.logits[AT + 1 :]])


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_answers_may_part_where_the_row_is_off_by_rounding_alone(name: str) -> None:
    cold = machine(name, keeps=False, tiny=True).ask(PROMPT, 6)
    rounding, _ = measured(cold, AT)
    assert 0 < rounding < 1e-3
    assert same_tokens(parted(cold, rounding), cold) == AT
    assert len(COUNTED.ties) == 1
    with pytest.raises(AssertionError, match=f"token {AT} is .* the row is"):
        same_tokens(parted(cold, 2 * ROUNDED_MORE * rounding), cold)
    COUNTED.take()  # the session's ties are others


def test_what_is_measured_leaves_the_model_as_it_was() -> None:
    cold = machine("gpt_oss", keeps=False, tiny=True).ask(PROMPT, 6)
    before, _ = read(cold, AT)
    scaled = [read(cold, AT, bits=bits)[0] for bits in BITS]
    assert not any(np.array_equal(row, before) for row in scaled)
    assert np.array_equal(read(cold, AT)[0], before)


def test_a_choice_of_experts_that_rounding_decides_is_tried_both_ways() -> None:
    cold = machine("qwen3_moe", keeps=False).ask(PROMPT, 6)
    plain, scores = read(cold, AT)
    ordered = [np.sort(each.scores, axis=-1) for each in scores]
    margins = [float((one[..., -2] - one[..., -3]).min()) for one in ordered]
    call = int(np.argmin(margins))  # two of the experts are chosen
    off = replace(scores[call], scores=scores[call].scores + 0.6 * margins[call])
    (nudge,) = scores[call].edges([off], 1.0)
    row, _ = read(cold, AT, nudges={call: nudge})
    assert np.abs(row - plain).max() > 1e-2, "another expert, another row"
    assert not list(scores[call].edges([scores[call]], 1.0)), "nothing moved"
