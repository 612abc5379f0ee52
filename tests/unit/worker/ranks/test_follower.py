"""A follower holds what rank 0 holds and says what it says, and tells the room that it has."""

import dataclasses
import gc
import random
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.generate import generation_stream

from hearth.shared.errors import StartError
from hearth.shared.settings import load_settings
from hearth.worker.cache.conversation_priority import Conversation
from hearth.worker.engine import mlx_memory
from hearth.worker.engine.forward_memory import ForwardMemory
from hearth.worker.kv.layer_kinds.kinds import leaves
from hearth.worker.kv.quantise_kv import QuantFormat, TurboFormat
from hearth.worker.ranks.follower_link import FollowerLink
from hearth.worker.ranks.follower_main import Follower, FollowerMemory
from hearth.worker.ranks.leading_kv import format_fields, format_from, handle_of
from hearth.worker.ranks.rank_link import RankMismatch
from hearth.worker.setup import memory_setup
from hearth.worker.setup.memory_setup import WorkerMemory
from hearth.worker.setup.rank_setup import SingleRank
from scripts.harness.socketless_worker import Machine, loaded, machine
from tests.helpers.ranks.replica_ranks import (
    ReplicaRanks,
    check_followed,
    no_drafts,
    ranked_machine,
)

BUDGET_MB = 0.12  # so little that rows are evicted, and slots' rows copied out

ONE = Conversation(1)  # else ends that differ are of different ones, as likely as each other

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
        answer = worker.ask(prompt, 6, conversation=ONE)
        said.append((answer.cached, answer.tokens))
        prompt = prompt + answer.tokens + words(turn, 40)
    for fork in range(2):
        answer = worker.ask(words(1, 150) + words(50 + fork, 60), 4, conversation=ONE)
        said.append((answer.cached, answer.tokens))
    together = [
        worker.submit(words(1, 120) + words(9 + n, 20 + 9 * n), 8 + 3 * n, conversation=ONE)
        for n in range(4)
    ]
    worker.run(lambda: len(worker.engine.decoder) == 4)
    worker.step()
    together.pop().request.lease.is_cancelled = True
    worker.run()
    said.append([(each.cached, worker.settled(each).tokens) for each in together])
    worker.work_ahead()
    answer = worker.ask(prompt, 4, conversation=ONE)
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
    assert asked and worker.engine.decoder.batch_request_ids
    assert follower.engine.decoder.batch_request_ids == worker.engine.decoder.batch_request_ids


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


TOKENS = 40


@pytest.fixture(scope="module")
def lead() -> Iterator[tuple[ReplicaRanks, Machine]]:
    ranks = ReplicaRanks(loaded("qwen3", tiny=True))
    yield ranks, ranked_machine("qwen3", ranks, loaded("qwen3", tiny=True))
    ranks.close()


def filled(worker: Machine, tokens: int = TOKENS) -> list[Any]:
    cache = worker.engine.new_cache()
    worker.layers.reserve(cache, tokens)
    worker.engine.prefill(cache, list(range(7, 7 + tokens)))
    return cache


def followed(ranks: ReplicaRanks, cache: list[Any]) -> list[Any]:
    ranks.settle()
    return ranks.followers[0].follower.kv.caches[handle_of(cache)]


def assert_same(own: list[Any], theirs: list[Any]) -> None:
    for ours, other in zip(leaves(own), leaves(theirs), strict=True):
        assert (ours.offset, ours.keys.shape) == (other.offset, other.keys.shape)
        assert mx.array_equal(ours.keys[..., : ours.offset, :], other.keys[..., : ours.offset, :])


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(2049, 2300), has_room=st.booleans())
def test_a_buffer_grows_by_as_much_as_rank_0s(
    lead: tuple[ReplicaRanks, Machine], rows: int, has_room: bool
) -> None:
    ranks, worker = lead
    with mx.stream(generation_stream):
        cache = filled(worker)
        worker.layers.has_room = lambda _nbytes: has_room
        worker.layers.reserve(cache, 2048)  # a quarter of that is more than a step
        worker.layers.reserve(cache, rows)
    assert_same(cache, followed(ranks, cache))


@settings(max_examples=10, deadline=None)
@given(cut=st.integers(1, TOKENS - 1), part=st.integers(1, TOKENS), packs=st.booleans())
def test_rows_come_back_from_what_is_kept_and_from_a_live_cache(
    lead: tuple[ReplicaRanks, Machine], cut: int, part: int, packs: bool
) -> None:
    ranks, worker = lead
    layers, form = worker.layers, QuantFormat(8, 32) if packs else None
    with mx.stream(generation_stream):
        source, target = filled(worker), worker.engine.new_cache()
        kept = layers.copy_rows(source, 0, cut, form)
        whole, some = layers.kept_rows(kept), layers.kept_rows(kept, 0, min(part, cut))
        rest = layers.rows(source, cut, TOKENS)
        count = cut + min(part, cut) + TOKENS - cut
        layers.put_rows(target, [whole, some, rest], count, count + 5)
        assert_same(target, followed(ranks, target))
        layers.trim(target, cut)
        assert_same(target, followed(ranks, target))


def test_rows_that_are_evicted_before_they_are_used_are_there_on_every_rank(
    lead: tuple[ReplicaRanks, Machine],
) -> None:
    ranks, worker = lead
    layers = worker.layers
    with mx.stream(generation_stream):
        source, target = filled(worker), worker.engine.new_cache()
        kept = layers.copy_rows(source, 0, TOKENS, None)
        run = layers.kept_rows(kept)
        del kept
        layers.trim(source, TOKENS - 1)  # tells what was let go of by now
        layers.put_rows(target, [run], TOKENS, TOKENS)
    assert_same(target, followed(ranks, target))


def test_a_follower_knows_what_a_step_costs(lead: tuple[ReplicaRanks, Machine]) -> None:
    ranks, worker = lead
    cost = dataclasses.replace(worker.engine.decoder.cost, row_bytes=1 / 3, window=7)
    worker.engine.decoder.cost = cost
    worker.engine.decoder.step()
    ranks.settle()
    assert ranks.followers[0].follower.engine.decoder.cost == cost


@given(
    st.none()
    | st.builds(QuantFormat, st.sampled_from([4, 8]), st.sampled_from([32, 64]))
    | st.builds(
        TurboFormat, st.sampled_from([2.0, 3.5]), st.sampled_from([mx.float32, mx.bfloat16])
    )
)
def test_a_format_that_is_told_is_the_same_format(form: Any) -> None:
    assert format_from(format_fields(form)) == form


MB = mlx_memory.MB
ENCODERS = 300 * MB


class TwoHere(SingleRank):
    ranks_here = 2


def test_a_follower_leaves_room_for_what_embeds_as_rank_0_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[int] = []
    monkeypatch.setattr(mlx_memory, "set_memory_limit", held.append)
    monkeypatch.setattr(memory_setup, "encoders_bytes", lambda _settings: ENCODERS)
    monkeypatch.setattr("hearth.worker.setup.memory_setup.encoders_bytes", lambda _: ENCODERS)
    settings = load_settings({"RANKS": "2", "MEMORY_LIMIT_MB": "1500"}, None)
    link: FollowerLink = None  # type: ignore[assignment]  # what it tells is not of interest
    memory = FollowerMemory(settings, link)
    memory.share(2)
    assert held == [(1500 * MB - ENCODERS) // 2]
    assert (
        memory.limit_and_use()[0]
        == WorkerMemory(settings, "ipc:///nowhere/w", TwoHere()).share.total
    )


class Rooms:
    """A link that keeps what it is given to tell."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def set_memory(self, limit_bytes: int, used_bytes: int) -> None:
        self.told.append((limit_bytes, used_bytes))


def test_what_is_given_up_is_told_though_the_last_look_was_just_now() -> None:
    """Rank 0 may have nothing to tell, and wait for this memory, from then on."""
    link: Any = Rooms()
    memory = FollowerMemory(load_settings({"RANKS": "2"}, None), link)
    memory.measure()
    memory.measure()
    assert len(link.told) == 1, "looks between operations are half a second apart"
    loads: Any = None
    follower = Follower(link, loads, loads, memory, loads)
    follower.operations["release_memory"]()
    assert len(link.told) == 2


def test_ranks_too_small_for_a_context_are_not_told_to_set_what_they_cannot_have() -> None:
    settings = load_settings({"RANKS": "2", "MEMORY_LIMIT_MB": "200"}, None)
    memory = WorkerMemory(settings, "ipc:///nowhere/w", TwoHere())
    model = loaded("qwen3", tiny=True)
    over_two = dataclasses.replace(model, facts=dataclasses.replace(model.facts, ranks=2))
    with pytest.raises(StartError, match=r"GB over 2 ranks\) .* set more RANKS or") as caught:
        memory.fit(over_two, lambda tokens: tokens << 30, ForwardMemory())
    assert "KV_BITS" not in str(caught.value)
