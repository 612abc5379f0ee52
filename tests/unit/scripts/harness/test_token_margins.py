"""Two answers may part where a last bit decides, and nowhere else."""

from dataclasses import replace

import numpy as np
import pytest

from scripts.harness.socketless_worker import Answer, machine
from scripts.harness.warm.token_margins import COUNTED, ROUNDED_MORE, measured, same_tokens

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
