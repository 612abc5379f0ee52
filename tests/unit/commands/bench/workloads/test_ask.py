"""Tells what requests were worth by right sums, and errors without a trace of a machine."""

from hypothesis import example, given, strategies as st

from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.workloads.ask import request_values
from hearth.commands.bench.workloads.counted_tokens.counted import measured
from hearth.commands.replay.player import Row
from hearth.commands.stream_client import Outcome, Reading, Tokens

IDS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


def row(
    ids: list[int] | None,
    *,
    error: str = "",
    prefilled: int = 1,
    ttft_s: float | None = 0.5,
    status: int = 200,
) -> Row:
    tokens = Tokens(len(ids or ()), 0, prefilled, 1, "")
    outcome = Outcome(status, tokens, ttft_s, 1.0, error, Reading())
    return Row(0, "some", "chat", outcome, ids)


def ideal(before: list[list[int]], prompts: list[list[int]]) -> int:
    """Count one by one which tokens no earlier prompt began with."""
    read, known = 0, list(before)
    for prompt in prompts:
        found = [
            size
            for size in range(len(prompt))
            if any(prompt[:size] == each[:size] for each in known)
        ]
        read += len(prompt) - max(found)
        known.append(prompt)
    return read


@given(st.lists(IDS, max_size=4), st.lists(IDS, min_size=1, max_size=5))
@example([[1, 1]], [[1, 1], [1, 1, 0]])
def test_the_ideal_counts_what_no_earlier_prompt_had(
    before: list[list[int]], prompts: list[list[int]]
) -> None:
    values = request_values([row(ids) for ids in prompts], [row(ids) for ids in before])
    assert values["ideal_tokens"] == ideal([[], *before], prompts)
    assert values["prompt_tokens"] == sum(map(len, prompts))
    assert set(values) <= set(MEASURES)


@given(st.lists(st.tuples(IDS, st.booleans(), st.floats(0, 9)), min_size=1, max_size=6))
def test_what_failed_is_counted_and_nothing_else_of_it(
    told: list[tuple[list[int], bool, float]],
) -> None:
    rows = [
        row(ids, error="bad" if fails else "", ttft_s=ttft_s, prefilled=2)
        for ids, fails, ttft_s in told
    ]
    values = request_values(rows)
    answered = [each for each in told if not each[1]]
    assert values["failed"] + values["requests"] == len(told)
    assert values["requests"] == len(answered)
    assert values["claimed_tokens"] == 2 * len(answered)
    assert values["prompt_tokens"] == sum(len(ids) for ids, *_ in answered)
    waits = sorted(ttft_s for *_, ttft_s in answered)
    assert ("ttft_p50_s" in values) == bool(waits) == ("ideal_tokens" in values)
    if waits:
        assert waits[0] <= values["ttft_p50_s"] <= values["ttft_p95_s"] <= waits[-1]


def test_a_prompt_whose_stream_broke_off_is_known_to_the_next_one() -> None:
    values = request_values([row([1, 2, 3], error="broke off"), row([1, 2, 3, 4])])
    assert (values["ideal_tokens"], values["requests"]) == (1, 1)


def test_without_a_meter_what_was_read_is_what_the_server_says() -> None:
    rows = [row([1, 2], prefilled=2)]
    assert measured(rows, {"wall_s": 1.0}).values["read_tokens"] == 2
    assert measured(rows, {"read_tokens": 7.0}).values["read_tokens"] == 7
    assert measured(rows, {}, before=rows).values["ideal_tokens"] == 1
    assert measured(rows, {}, errors=("late",)).errors == ("late",)
