"""Counted workloads count right: the ideal, what failed; salts and digests keep things apart."""

import json

import pytest
from hypothesis import example, given, strategies as st

from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.workload import SCALES
from hearth.commands.bench.workloads.ask import request_values
from hearth.commands.bench.workloads.counted_tokens.counted import measured
from hearth.commands.bench.workloads.server_lives import answers
from hearth.commands.bench.workloads.sessions import SESSIONS_DIR, cut, loaded, salted
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


NAMES = sorted(path.name.removesuffix(".jsonl.xz") for path in SESSIONS_DIR.glob("*.xz"))
QUICK, WHOLE = SCALES["quick"], SCALES["whole"]


# ---------------------------------------------------------------- shipped


@pytest.mark.parametrize("name", NAMES)
def test_a_salt_changes_nothing_but_where_it_stands(name: str) -> None:
    rows = cut(loaded(name), QUICK)
    for row, with_salt in zip(rows, salted(rows, "GRAIN "), strict=True):
        told = json.dumps(with_salt.body)
        tools = row.body.get("tools") or ()
        assert told.count("GRAIN ") == 1 + bool(tools)
        assert told.replace("GRAIN ", "") == json.dumps(row.body)


def answered(text: str = "", thought: str = "") -> Row:
    """Return how an answered request of 100 tokens went, of which none was kept."""
    reading = Reading(text=[text], reasoning=[thought], is_complete=True)
    outcome = Outcome(200, Tokens(100, 0, 100, 1, ""), 0.1, 0.2, "", reading)
    return Row(0, "t", "chat", outcome, (1, 2, 3, 4))


def test_no_answer_is_cold_where_the_meter_saw_less_than_the_prompts() -> None:
    rows = [answered("a"), answered("b")]
    assert all(answers.cold_digests(rows, 197))
    assert not any(answers.cold_digests(rows, 190))
    assert all(answers.cold_digests(rows, None)), "not metered: the server is believed"


def test_a_failed_request_has_no_digest_but_its_place() -> None:
    refused = Row(0, "t", "chat", Outcome.refused(503, "full"), None)
    first, second = answers.cold_digests([refused, answered()], None)
    assert first == answers.NO_DIGEST != second


@given(st.text(), st.text())
def test_digests_tell_answers_apart_and_nothing_of_them(one: str, other: str) -> None:
    told = answers.digest(answered(one)), answers.digest(answered(other))
    assert (told[0] == told[1]) == (one == other)
    assert all(len(each) == answers.DIGEST_CHARS for each in told)
    assert answers.digest(answered("b", "a")) != answers.digest(answered("ab")), "it was thought"
