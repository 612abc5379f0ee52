"""Decoding costs what whole answers take beyond answers of one token."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.workloads.decode_cost import Asking, Decoded, decode_values
from hearth.commands.bench.workloads.timed_stream import TimedAnswer

TOKENS = 64


def answer(completion: int, step_s: float = 0.01, first_s: float = 0.5) -> TimedAnswer:
    arrivals = tuple(first_s + step_s * number for number in range(completion))
    return TimedAnswer(0.0, first_s + step_s * completion, arrivals, 9, completion, "", "")


def asking(count: int, completion: int, wall_s: float, forwards: float | None) -> Asking:
    taken = {"cpu_s": 1.0, "memory_bytes": 5.0}
    return Asking([answer(completion) for _ in range(count)], wall_s, forwards, taken)


@given(
    st.integers(1, 16), st.integers(16, 300), st.integers(1, 9), st.floats(0.001, 9),
    st.floats(1e-3, 1.0),
)  # fmt: skip
def test_what_is_before_the_first_token_counts_nowhere(
    count: int, tokens: int, prompt_forwards: int, prompt_s: float, step_s: float
) -> None:
    """All streams in one batch: a forward of each step, whatever their prompts took."""
    again = asking(count, 1, prompt_s, prompt_forwards)
    steps = tokens - 1
    whole = asking(count, tokens, prompt_s + steps * step_s, prompt_forwards + steps)
    values = decode_values(again, whole)
    assert values["forwards_per_token"] == pytest.approx(1 / count)
    assert values["tokens_s"] == pytest.approx(count / step_s, rel=1e-6)


def test_of_too_few_tokens_nothing_is_said() -> None:
    assert decode_values(asking(1, 1, 1.0, 3), asking(1, 4, 1.1, 6)) == {}
    quick = decode_values(asking(1, 1, 1.0, 3), asking(1, 64, 0.9, 66))
    assert quick == {"forwards_per_token": 1.0}, "no speed of no time"
    unmetered = decode_values(asking(1, 1, 1.0, None), asking(1, 64, 2.0, None))
    assert unmetered == {"tokens_s": 63.0}


def test_a_failure_leaves_no_figures_of_decoding() -> None:
    whole = asking(2, TOKENS, 1.5, 67)
    broken = replace(whole, answers=[whole.answers[0], replace(whole.answers[1], error="500 no")])
    found = Decoded(asking(2, 1, 1, 4), asking(2, 1, 0.5, 4), broken)
    values = found.values()
    assert (values["failed"], values["requests"]) == (1, 5) and found.errors() == ("500 no",)
    assert not {"tokens_s", "gap_p50_s", "forwards_per_token"} & set(values)
