"""Random conversations with images, warm against cold, on every vision fixture."""

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from scripts.fixtures.fixture_cache import VISION_NAMES
from scripts.harness.slow_properties import slow
from scripts.harness.vision_worker import SIZES, LookingMachine, shown, swapped
from scripts.harness.warm.warm_talks import OPERATIONS, TOKENS_MAX, play
from tests.helpers.by_day import by_day
from tests.helpers.worker.disk_workers import Workers
from tests.helpers.worker.vision_talks import LookingTalk


@pytest.fixture(scope="module", params=by_day(VISION_NAMES, ("gemma3", "qwen3_5_vl")))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@slow(2)
@given(operations=OPERATIONS)
def test_in_exact_mode_warm_is_cold_to_the_bit(
    name: str, operations: list[tuple[str, int]]
) -> None:
    warm = LookingMachine(name, is_exact=True)
    cold = LookingMachine(name, keeps=False, is_exact=True)
    play(LookingTalk(name, warm, cold), operations, is_exact=True)
    assert not warm.keeper.counts["vlm_retreat"]


@slow(2)
@given(operations=OPERATIONS)
def test_by_default_warm_says_what_cold_says(name: str, operations: list[tuple[str, int]]) -> None:
    warm, cold = LookingMachine(name), LookingMachine(name, keeps=False)
    play(LookingTalk(name, warm, cold), operations, is_exact=False)
    assert not warm.keeper.counts["vlm_retreat"]


@slow(2)
@given(operations=OPERATIONS, slots=st.integers(1, 3), budget_kb=st.sampled_from([0, 400, 1500]))
def test_with_hardly_any_room_warm_is_still_cold_to_the_bit(
    name: str, operations: list[tuple[str, int]], slots: int, budget_kb: int
) -> None:
    warm = LookingMachine(name, is_exact=True, slots_max=slots, budget_mb=budget_kb / 1024)
    cold = LookingMachine(name, keeps=False, is_exact=True)
    play(LookingTalk(name, warm, cold), operations, is_exact=True, is_ample=False)
    assert not warm.keeper.counts["vlm_retreat"]


@slow(3)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 3))
def test_nothing_past_an_image_that_was_swapped_is_reused(name: str, seed: int, turns: int) -> None:
    """And all before it is, up to the last cut there."""
    chance = random.Random(seed)
    warm, cold = LookingMachine(name), LookingMachine(name, keeps=False)
    talk = LookingTalk(name, warm, cold)
    ids = talk.opening(chance)
    for _ in range(turns):
        answer = talk.ask(ids, is_exact=False)
        ids = talk.turn(chance, ids, answer.tokens)
    if not any(key < 0 for key in ids):
        ids = talk.message("user", [*shown(name, 2), *talk.words(chance, 20)]) + ids
    talk.ask(ids, is_exact=False)
    other, at = swapped(name, ids, chance)
    answer = talk.ask(other, is_exact=False)
    cuts = [0, *warm.rule.cuts(other)]
    before = max(cut for cut in cuts if cut <= at)
    assert before <= answer.cached <= at
    again = talk.ask(ids, is_exact=False)  # and what the first image gave is still there
    assert again.cached >= max(cut for cut in cuts if cut < len(ids) - TOKENS_MAX)


def test_a_turn_behind_an_image_calls_no_encoder_and_reads_only_what_is_new(name: str) -> None:
    warm, cold = LookingMachine(name), LookingMachine(name, keeps=False)
    talk = LookingTalk(name, warm, cold)
    chance = random.Random(1)
    plain = super(LookingTalk, talk).words
    ids = talk.message("system", plain(chance, 300))
    ids += talk.message("user", [*shown(name, 3), *plain(chance, 20)]) + talk.header["assistant"]
    first = talk.ask(ids, is_exact=False)
    assert warm.encoder_calls == 1
    for words in (12, 20):
        ids = [*ids, *first.tokens, *talk.turn_end, *talk.message("user", plain(chance, words))]
        ids += talk.header["assistant"]
        first = talk.ask(ids, is_exact=False)
        assert warm.encoder_calls == 1
        assert first.cached >= 0.94 * (len(ids) - words - 10)


def test_idle_time_reads_a_long_image_in_the_forwards_that_a_request_takes(name: str) -> None:
    warm = LookingMachine(name, is_exact=True, chunk=16)
    cold = LookingMachine(name, keeps=False, is_exact=True, chunk=16)
    talk = LookingTalk(name, warm, cold)
    image = shown(name, 3)
    header = talk.header["assistant"]
    talk.ask(talk.message("user", [*range(300, 310), *image, 320]) + header, is_exact=True)
    ids = talk.message("user", [*range(400, 430), *image, *range(500, 540)]) + header
    warm.foresee(ids)
    warm.work_ahead()
    assert talk.ask(ids, is_exact=True).cached == warm.rule.natural(ids)[-1]
    assert warm.encoder_calls == 1


def test_images_that_are_read_in_turns_are_encoded_once_each_where_none_are_kept(name: str) -> None:
    warm = LookingMachine(name, chunk=8, features_mb=0)
    talk = LookingTalk(name, warm, LookingMachine(name, keeps=False))
    header = talk.header["assistant"]
    one = talk.message("user", [*range(300, 340), *shown(name, 3), *range(400, 420)]) + header
    other = talk.message("user", [*range(600, 640), *shown(name, 7)]) + header
    warm.submit(one, TOKENS_MAX)
    warm.submit(other, TOKENS_MAX)
    warm.run(until=lambda: warm.encoder_calls == 2)
    warm.scheduler.forget()
    assert warm.engine.vision is not None
    warm.engine.vision.release()  # as DELETE /v1/cache does
    warm.run()
    assert warm.encoder_calls == 4
    together = [*shown(name, 0), *shown(name, 1), *shown(name, 4)]
    warm = LookingMachine(name, chunk=256, features_mb=0)
    warm.ask(talk.message("user", [300, *together, 301]) + header)
    assert warm.encoder_calls == 3


def test_an_image_that_comes_back_in_another_line_is_not_encoded_again(name: str) -> None:
    warm, cold = LookingMachine(name), LookingMachine(name, keeps=False)
    talk = LookingTalk(name, warm, cold)
    chance = random.Random(2)
    for number in range(2 * len(SIZES)):
        ids = talk.message("user", [*chance.sample(range(300, 2900), 9), *shown(name, number)])
        talk.ask(ids + talk.header["assistant"], is_exact=False)
    assert warm.encoder_calls == 2 * len(SIZES)
    for number in range(2 * len(SIZES)):
        ids = talk.message("user", [*chance.sample(range(300, 2900), 9), *shown(name, number)])
        talk.ask(ids + talk.header["assistant"], is_exact=False)
    assert warm.encoder_calls == 2 * len(SIZES)


@pytest.mark.parametrize("is_exact", [True, False])
def test_after_a_restart_the_disk_has_images_too(tmp_path: Path, name: str, is_exact: bool) -> None:
    workers = Workers(tmp_path)
    chance = random.Random(3)
    cold = LookingMachine(name, keeps=False, is_exact=is_exact)
    first = LookingTalk(name, workers.start(name, make=LookingMachine, is_exact=is_exact), cold)
    ids = first.message("system", chance.sample(range(300, 2900), 90))
    ids += first.message("user", [*shown(name, 3), *range(300, 330), *shown(name, 1), 301])
    ids += first.header["assistant"]
    answer = first.ask(ids, is_exact)
    workers.flush()
    again = LookingTalk(name, workers.start(name, make=LookingMachine, is_exact=is_exact), cold)
    following = again.turn(chance, ids, answer.tokens)
    behind = following[len(ids) :]
    warm = again.ask(following, is_exact)
    assert warm.usage is not None and warm.usage.source == "ssd"
    assert warm.cached >= answer.request.query.limit
    assert again.warm.encoder_calls == len({key for key in behind if key < -(1 << 30)})
    workers.kill()


def test_a_client_that_leaves_amid_an_image_leaves_nothing_that_is_resumed_amid_it(
    name: str,
) -> None:
    warm, cold = LookingMachine(name, chunk=16), LookingMachine(name, keeps=False, chunk=16)
    talk = LookingTalk(name, warm, cold)
    image = list(shown(name, 3))
    start = talk.message("user", [*range(300, 340), *image, *range(400, 420)])
    ids = start + talk.header["assistant"]
    at, inside = ids.index(image[0]), 0
    for position in range(at + 1, at + len(image), 16):
        answer = warm.submit(ids, TOKENS_MAX)
        request = answer.request
        warm.run(until=lambda request=request, to=position: request.position >= to)
        request.lease.is_cancelled = True
        inside += at < request.position < at + len(image)
        warm.run()
        warm.check()
        again = warm.submit(ids, TOKENS_MAX)
        assert again.request.kept.tokens <= at or again.request.kept.tokens >= at + len(image)
        again.request.lease.is_cancelled = True
        warm.run()
    assert inside, "a long image is read in several forwards"
    last = talk.ask(ids, is_exact=False)
    assert np.array_equal(last.logits[0], cold.answers["r1"].logits[0])
    assert not warm.keeper.counts["vlm_retreat"] and warm.encoder_calls == 1


def test_a_client_that_leaves_behind_the_encoder_is_not_prefilled_for(name: str) -> None:
    """And whoever comes back finds the image encoded."""
    warm, cold = LookingMachine(name), LookingMachine(name, keeps=False)
    talk = LookingTalk(name, warm, cold)
    image = list(shown(name, 3))
    ids = talk.message("user", [*range(300, 420), *image, 301]) + talk.header["assistant"]
    answer = warm.submit(ids, TOKENS_MAX)
    warm.run(until=lambda: warm.encoder_calls > 0)
    assert 0 < answer.request.position <= ids.index(image[0])
    answer.request.lease.is_cancelled = True
    warm.run()
    assert (answer.reason, answer.prefilled) == ("cancelled", answer.request.position)
    talk.ask(ids, is_exact=False)
    assert warm.encoder_calls == 1
