"""Requests are computed in short steps, a short one between those of a long one."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Reranked
from hearth.worker.embeddings.encoder_models import TokenRow
from hearth.worker.embeddings.job_queue import TOKENISED_CHARS, Job, JobQueue
from hearth.worker.embeddings.length_batches import (
    SQUARE_MAX,
    TOKENS_MAX,
    TOKENS_MIN,
    WASTE_DIVISOR,
    WASTE_TOKENS,
    ForwardPace,
    LengthBatches,
)
from hearth.worker.schedule.client_lease import ClientLease

LENGTHS: Final = st.lists(st.integers(1, 9_000), min_size=1, max_size=80)


class CountingModel:
    """Has a token a character, and gives each row's length; a forward takes a second a token."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.batches: list[list[int]] = []
        self.tokenised: list[int] = []

    def chars(self, item: Any) -> int:
        return len(item)

    def rows(self, items: Sequence[Any], first: int, truncate: bool) -> list[TokenRow]:
        self.tokenised.append(len(items))
        if "bad" in items:
            raise RequestError("bad")
        return [TokenRow(range(len(item))) for item in items]

    def values(self, rows: Sequence[TokenRow]) -> NDArray[np.float32]:
        lengths = [len(row.ids) for row in rows]
        self.batches.append(lengths)
        self.now_s += max(lengths) * len(rows)
        return np.array(lengths, np.float32)[:, None]


def job_of(model: CountingModel, lengths: Sequence[int], request_id: str = "1") -> Job:
    def finish(values: NDArray[np.float32], tokens: list[int]) -> Reranked:
        return Reranked(request_id, [float(value) for value in values[:, 0]], sum(tokens))

    lease = ClientLease(request_id, b"proxy")
    return Job(lease, model, ["x" * length for length in lengths], False, finish)


def step(job: Job, model: CountingModel, pace: ForwardPace) -> None:
    if job.is_tokenised:
        job.compute(pace, lambda: model.now_s)
    else:
        job.tokenise()


@given(lengths=LENGTHS, tokens_max=st.integers(1, 20_000))
def test_each_row_is_computed_once_and_its_value_stands_in_its_place(
    lengths: list[int], tokens_max: int
) -> None:
    model = CountingModel()
    job = job_of(model, lengths)
    while not job.is_computed:
        step(job, model, ForwardPace(1e9, tokens_max))
        assert job.tokens_left >= 0
    assert job.answer() == Reranked("1", [float(length) for length in lengths], sum(lengths))
    assert sorted(length for batch in model.batches for length in batch) == sorted(lengths)


@given(lengths=LENGTHS, tokens_max=st.integers(1, 20_000))
def test_a_batch_holds_its_bounds_and_is_one_row_where_that_alone_is_larger(
    lengths: list[int], tokens_max: int
) -> None:
    batches, seen = LengthBatches(lengths), []
    while not batches.is_empty:
        batch = [lengths[row] for row in batches.take(tokens_max)]
        seen.append(max(batch))
        padded = max(batch) * len(batch)
        if len(batch) > 1:
            assert padded <= min(tokens_max, TOKENS_MAX) and padded * max(batch) <= SQUARE_MAX
        assert padded - sum(batch) <= padded // WASTE_DIVISOR + WASTE_TOKENS
    assert seen == sorted(seen, reverse=True) and batches.tokens_left == 0


@given(st.lists(st.tuples(st.floats(1e-6, 1e-2), st.integers(1, 40)), min_size=1, max_size=5))
def test_forwards_come_to_take_no_longer_than_allowed_however_fast_the_machine_is(
    phases: list[tuple[float, int]],
) -> None:
    pace = ForwardPace(0.025, 128)
    for a_token_s, _ in phases:
        for _ in range(60):
            pace.record(pace.tokens, 0.001 + a_token_s * pace.tokens)
        took_s = 0.001 + a_token_s * pace.tokens
        is_bounded = took_s <= 0.025 or pace.tokens == TOKENS_MIN
        assert is_bounded and (took_s > 0.008 or pace.tokens > 8_000), (pace.tokens, took_s)


def test_one_long_row_says_nothing_about_the_others() -> None:
    pace = ForwardPace(0.025, 128)
    pace.record(8_000, 3.0)
    assert pace.tokens == 128


def test_a_short_request_waits_for_no_long_one_and_a_long_one_gets_every_second_step() -> None:
    model, pace, jobs = CountingModel(), ForwardPace(1e9, 64), JobQueue()
    long = job_of(model, [64] * 400)
    jobs.append(long)
    for _ in range(20):
        step(jobs.next(), model, pace)
    answered, long_steps = [], 0
    for number in range(2, 32):  # one short request after the other, without end
        short = job_of(model, [3, 4], str(number))
        jobs.append(short)
        for _ in range(6):
            chosen = jobs.next()
            step(chosen, model, pace)
            long_steps += chosen is long
            if short.is_computed:
                break
        jobs.remove(short)
        answered.append(short.is_computed)
    assert all(answered)
    assert long_steps >= 29, "a stream of short requests does not starve it"


def test_texts_are_tokenised_in_slices_and_one_that_cannot_be_ends_its_request() -> None:
    model = CountingModel()
    job = job_of(model, [TOKENISED_CHARS // 4] * 9 + [TOKENISED_CHARS * 3])
    while not job.is_tokenised:
        job.tokenise()
    assert model.tokenised == [4, 4, 2]
    bad = Job(ClientLease("2", b""), model, ["bad"], False, lambda *_: Reranked("2", [], 0))
    with pytest.raises(RequestError):
        bad.tokenise()


def test_a_job_whose_client_has_left_has_no_more_steps() -> None:
    model, jobs = CountingModel(), JobQueue()
    left, stays = job_of(model, [5]), job_of(model, [50])
    jobs.append(left)
    jobs.append(stays)
    assert jobs.take_gone() == []
    left.lease.is_cancelled = True
    assert (jobs.take_gone(), len(jobs), jobs.next()) == ([left], 1, stays)
