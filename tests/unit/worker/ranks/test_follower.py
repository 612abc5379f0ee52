"""A follower holds what rank 0 holds, and says what it says, whatever requests come."""

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest

from hearth.worker.ranks.rank_link import RankMismatch
from scripts.harness.socketless_worker import Machine, loaded, machine
from tests.helpers.ranks.replica_ranks import (
    ReplicaRanks,
    check_followed,
    no_drafts,
    ranked_machine,
)

BUDGET_MB = 0.12  # so little that rows are evicted, and slots' rows copied out

Said = list[Any]


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "qwen3")


@pytest.fixture
def ranks(model: str) -> Iterator[ReplicaRanks]:
    made = ReplicaRanks(loaded(model, tiny=True))
    yield made
    made.close()


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 2000) for _ in range(count)]


def talk(worker: Machine) -> Said:
    """Have a conversation with turns, forks, parallel answers, a cancel and idle work."""
    said: Said = []
    prompt = words(1, 200)
    for turn in range(3):
        answer = worker.ask(prompt, 6)
        said.append((answer.cached, answer.tokens))
        prompt = prompt + answer.tokens + words(turn, 40)
    for fork in range(2):
        answer = worker.ask(words(1, 150) + words(50 + fork, 60), 4)
        said.append((answer.cached, answer.tokens))
    together = [
        worker.submit(words(1, 120) + words(9 + n, 20 + 9 * n), 8 + 3 * n) for n in range(4)
    ]
    worker.run(lambda: len(worker.engine.decoder) == 4)
    worker.step()
    together.pop().request.lease.is_cancelled = True
    worker.run()
    said.append([(each.cached, worker.settled(each).tokens) for each in together])
    worker.work_ahead()
    answer = worker.ask(prompt, 4)
    said.append((answer.cached, answer.tokens))
    return said


@pytest.mark.parametrize("model", ["qwen3", "qwen3_5", "gpt_oss"], indirect=True)
def test_ranks_say_what_one_rank_says_and_hold_the_same(model: str, ranks: ReplicaRanks) -> None:
    several = ranked_machine(model, ranks, loaded(model, tiny=True), budget_mb=BUDGET_MB)
    alone = machine(model, tiny=True, drafts=no_drafts(), budget_mb=BUDGET_MB)
    assert talk(several) == talk(alone)
    assert several.keeper.counts == alone.keeper.counts
    assert several.keeper.evictions, "the budget is to be too small"
    several.check()
    check_followed(several, ranks)


def test_requests_without_the_cache_leave_nothing_with_a_follower(ranks: ReplicaRanks) -> None:
    worker = ranked_machine("qwen3", ranks, loaded("qwen3", tiny=True), keeps=False)
    worker.ask(words(1, 90), 6)
    del worker.answers["r1"]
    gc.collect()
    ranks.settle()
    assert not ranks.followers[0].follower.kv.caches


def test_who_shares_a_forward_is_decided_by_the_memory_of_rank_0(ranks: ReplicaRanks) -> None:
    worker = ranked_machine("qwen3", ranks, loaded("qwen3", tiny=True), budget_mb=64)
    asked: list[int] = []
    worker.engine.decoder.has_room = lambda nbytes: bool(asked.append(nbytes)) or len(asked) > 1
    for number in range(3):
        worker.submit(words(number, 30), 12)
    worker.run(lambda: len(worker.engine.decoder) == 3)
    for _ in range(3):
        worker.step()
    ranks.settle()
    follower = ranks.followers[0].follower
    assert asked and worker.engine.decoder.batch_keys
    assert follower.engine.decoder.batch_keys == worker.engine.decoder.batch_keys


def test_a_follower_that_adds_to_a_token_is_found_at_the_next_step(ranks: ReplicaRanks) -> None:
    worker = ranked_machine("qwen3", ranks, loaded("qwen3", tiny=True))
    worker.submit(words(1, 40), 8)
    worker.run(lambda: len(worker.engine.decoder) == 1)
    ranks.followers[0].added = 1
    with pytest.raises(RankMismatch, match=r"rank 0 (chose|computes)"):
        worker.run()


def test_what_goes_in_idle_time_is_given_back_once_nothing_else_is_told(
    ranks: ReplicaRanks,
) -> None:
    worker = ranked_machine("qwen3", ranks, loaded("qwen3", tiny=True))
    worker.ask(words(1, 90), 2)
    worker.answers.clear()
    ranks.settle()
    ranks.tidy()  # which looks, and tells nothing yet
    worker.keeper.clear()
    gc.collect()
    assert len(ranks.followers[0].follower.kv.caches) == 1
    ranks.tidy()
    ranks.settle()
    assert not ranks.followers[0].follower.kv.caches
