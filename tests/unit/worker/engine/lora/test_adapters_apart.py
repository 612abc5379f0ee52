"""Trunks, prefills, pins, files and keys keep adapters apart.

tests/property/warm/test_adapters.py holds that slots, memory, batches and idle time do.
"""

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from hearth.worker.cache.block_hash import adapter_root, key_root
from hearth.worker.cache_report import cache_report
from scripts.harness.lora_files import (
    MLX_LM_WEIGHTS,
    adapted,
    adapted_machine,
    adapter_dirs,
    upstream_adapted,
    with_adapters,
)
from scripts.harness.socketless_worker import Answer, Machine, loaded
from scripts.harness.store_builders import ROOT
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.by_day import by_day
from tests.helpers.worker.disk_workers import Workers
from tests.helpers.worker.kv_prompts import KINDS, prompt

ANSWER = 12


def alone(name: str, adapter: str, ids: list[int]) -> Answer:
    """Return what a model says that has the adapter for good, asked alone and cold."""
    return adapted_machine(name, upstream_adapted(name, adapter), keeps=False).ask(ids, ANSWER)


# ------------------------------------------------------------ forwards


@pytest.mark.parametrize("name", by_day(["qwen3", "gpt_oss"], ["qwen3"]))
def test_a_trunk_that_was_read_with_an_adapter_carries_its_own_rows_alone(name: str) -> None:
    warm = adapted_machine(name, slots_max=8, running_max=8)
    warm.engine.decoder.trunk_tokens_min = 64
    ids = prompt(name, 150, 40)
    asked = ["", "", "one", "one", "two"]
    answers = [warm.submit(ids, ANSWER, adapter=adapter) for adapter in asked]
    of_key = {answer.request.request_id: answer.request.query.adapter for answer in answers}
    shared: dict[Any, set[str]] = {}

    def look() -> bool:
        for key, trunk in warm.engine.decoder.trunks.items():
            shared.setdefault(trunk, set()).add(of_key[key])
        return False

    warm.run(until=look)
    assert sorted(map(sorted, shared.values())) == [[""], ["one"]]
    for answer, adapter in zip(answers, asked, strict=True):
        same_tokens(warm.settled(answer), alone(name, adapter, ids))


def test_nobody_waits_for_a_prefill_of_another_adapter() -> None:
    warm = adapted_machine("qwen3")
    ids = prompt("qwen3", 300, 100)
    first = warm.submit(ids, ANSWER)
    warm.step()
    same, other = warm.submit(ids, ANSWER), warm.submit(ids, ANSWER, adapter="one")
    warm.step()
    assert first.request.slot is not None and not first.request.is_prefilled
    assert same.request.slot is None and other.request.slot is not None
    warm.run()
    assert warm.settled(same).cached > 0 and warm.settled(other).cached == 0


# ------------------------------------------------------------ kept KV


# ------------------------------------------------------------ the disk


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path / "kv")
    yield made
    made.kill()


def restarted(workers: Workers, name: str, **directories: Path) -> Machine:
    model = with_adapters(loaded(name), **directories)

    def make(_name: str, **rules: Any) -> Machine:
        return adapted_machine(name, model, **rules)

    return workers.start(name, ROOT, make)


def asked_and_written(workers: Workers, warm: Machine, ids: list[int], adapter: str) -> Answer:
    answer = warm.ask(ids, ANSWER, adapter=adapter)
    warm.keeper.queue_unwritten()
    workers.flush()
    return answer


@pytest.mark.parametrize("name", by_day(KINDS))
def test_behind_a_restart_each_adapter_finds_its_own_kv_by_its_bytes(
    workers: Workers, tmp_path: Path, name: str
) -> None:
    one = tmp_path / "copy"
    shutil.copytree(adapter_dirs(name)["one"], one)
    ids = prompt(name, 120, 60)
    warm = restarted(workers, name, one=one)
    for adapter in ("", "one"):
        assert asked_and_written(workers, warm, ids, adapter).cached == 0
    for adapter in ("renamed", ""):  # its name does not matter
        warm = restarted(workers, name, renamed=one)
        again = warm.ask(ids, ANSWER, adapter=adapter)
        assert again.request.source == "ssd" and again.cached == again.request.query.limit
        same_tokens(again, alone(name, adapter and "one", ids))
    weights: dict[str, mx.array] = mx.load(str(one / MLX_LM_WEIGHTS))  # type: ignore[assignment]
    mx.eval(weights)
    mx.save_safetensors(
        str(one / MLX_LM_WEIGHTS), {name: each * 1.01 for name, each in weights.items()}
    )
    assert restarted(workers, name, one=one).ask(ids, ANSWER, adapter="one").cached == 0
    config = one / "adapter_config.json"  # the scale is not in the weights
    shutil.copy(adapter_dirs(name)["one"] / MLX_LM_WEIGHTS, one / MLX_LM_WEIGHTS)
    config.write_text(config.read_text().replace("8.0", "7.0"))
    assert restarted(workers, name, one=one).ask(ids, ANSWER, adapter="one").cached == 0


def test_one_adapter_under_two_names_is_one_to_the_cache() -> None:
    """And a slot is the last name's: idle time reads for it where the first is gone."""
    directory = adapter_dirs("qwen3")["one"]
    model = with_adapters(loaded("qwen3"), first=directory, second=directory)
    warm = adapted_machine("qwen3", model)
    ids = prompt("qwen3", 120, 60)
    assert warm.ask(ids, ANSWER, adapter="first").cached == 0
    second = warm.ask(ids, ANSWER, adapter="second")
    assert second.cached == second.request.query.limit
    same_tokens(second, alone("qwen3", "one", ids))
    assert [slot.adapter for slot in warm.keeper.slots] == ["second"]
    warm.check()


# ------------------------------------------------------------ keys


def test_keys_are_apart_with_an_adapter_too_and_each_sees_its_own_in_the_report() -> None:
    identities = adapted("qwen3").adapters.identities
    warm = adapted_machine("qwen3")
    ids = prompt("qwen3", 120, 60)
    for key in ("mine", "theirs"):
        for adapter in ("", "one"):
            asked = warm.ask(ids, ANSWER, adapter=adapter, root=key_root(ROOT, key))
            assert asked.cached == 0, (key, adapter)
    for key, rows in (("mine", 2), ("theirs", 2), ("", 4), ("none", 0)):
        told = cache_report(warm.keeper, 0, key, adapters=identities)
        assert len(told["slots"]) == rows, key
    assert {slot["adapter"] for slot in told["slots"]} <= {None, "one"}


def test_all_roots_differ() -> None:
    roots = [ROOT, *(key_root(ROOT, key) for key in ("", "a"))]
    all_roots = [*roots, *(adapter_root(root, each) for root in roots for each in ("", "a", "b"))]
    assert all(one != other for one, other in pairwise(sorted(all_roots)))
