"""Checks that a worker warm from another worker's disk gives the same tokens as a cold one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hearth.worker.kv.quantise_kv import QuantFormat
from scripts.harness.socketless_worker import Answer, loaded, machine
from scripts.harness.warm.token_margins import same_bits, same_tokens
from tests.helpers.worker.disk_workers import GB, TEXT, Workers, prompt


@pytest.fixture
def workers(tmp_path: Path) -> Iterator["Workers"]:
    made = Workers(tmp_path)
    yield made
    made.kill()


def assert_same(warm: Answer, cold: Answer, is_exact: bool) -> None:
    if is_exact:
        same_bits(warm, cold)
    else:
        same = same_tokens(warm, cold)
        np.testing.assert_allclose(warm.logits[:same], cold.logits[:same], atol=1e-3)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gpt_oss", "falcon_h1", "gemma3_text"])
def test_a_conversation_goes_on_in_another_worker(
    workers: Workers, name: str, is_exact: bool
) -> None:
    asked = prompt(name, TEXT)
    first = workers.start(name, is_exact=is_exact)
    answer = first.ask(asked)
    first.keeper.queue_unwritten()
    workers.flush()
    end = loaded(name).tokenizer.encode("<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n")
    following = [*asked, *answer.request.sampled, *end]
    second = workers.start(name, is_exact=is_exact)
    cold = machine(name, keeps=False, is_exact=is_exact)
    warm = second.ask(following)
    assert warm.usage is not None and warm.usage.source == "ssd"
    kept = len(asked) - 2 if is_exact else len(asked) + len(answer.request.sampled) - 2
    if name in ("qwen3_5", "falcon_h1"):  # the state behind a short answer is not worth its bytes
        kept = answer.request.query.limit
    assert warm.cached >= kept - (64 if is_exact else 0), (warm.cached, kept)
    assert_same(warm, cold.ask(following), is_exact)
    second.check()


def test_an_emptied_cache_is_empty_on_disk_too(workers: Workers) -> None:
    asked = prompt("qwen3", TEXT)
    first = workers.start("qwen3")
    first.ask(asked)
    workers.flush()
    first.scheduler.forget()
    again = first.ask(asked)
    assert again.cached == 0 and again.usage is not None and again.usage.source == "none"
    first.scheduler.forget()
    assert workers.start("qwen3").ask(asked).cached == 0


@pytest.mark.parametrize(
    "rules",
    [
        {"store_format": QuantFormat(8, 64)},
        {"running_format": QuantFormat(8, 64), "running_from": 64},
    ],
    ids=["stored", "running"],
)
def test_quantised_kv_comes_back_as_it_was(workers: Workers, rules: dict[str, Any]) -> None:
    asked = prompt("qwen3", TEXT)
    first = workers.start("qwen3", **rules)
    first.ask(asked)
    for number in range(4):  # its slot is given up, so that it is packed
        first.ask(prompt("qwen3", f"{number} is another question. {TEXT}"))
    workers.flush()
    warm = workers.start("qwen3", **rules).ask(asked)
    assert warm.usage is not None and warm.usage.source == "ssd"
    assert warm.cached == warm.request.query.limit
    again = machine("qwen3", **rules)
    again.ask(asked)
    assert warm.tokens == again.ask(asked).tokens


def test_what_the_disk_was_too_slow_for_is_written_at_the_end(workers: Workers) -> None:
    asked = prompt("qwen3", TEXT)
    first = workers.start("qwen3")
    disk_thread = first.keeper.disk.thread
    disk_thread.queue_bytes_max = 0  # as if it were full
    first.ask(asked)
    for number in range(4):  # its slot is given up, and so in RAM only
        first.ask(prompt("qwen3", f"{number} is another question. {TEXT}"))
    workers.flush()
    assert disk_thread.report()["files"] == 0
    disk_thread.queue_bytes_max = GB
    first.keeper.queue_unwritten()
    workers.flush()
    warm = workers.start("qwen3").ask(asked)
    assert warm.cached == warm.request.query.limit


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_what_other_cuts_left_is_reused_as_fast_and_by_no_exact_server(
    workers: Workers, name: str
) -> None:
    asked = prompt(name, TEXT)
    cold = machine(name, keeps=False, chunk=32).ask(asked)
    workers.start(name, chunk=64).ask(asked)
    workers.flush()
    warm = workers.start(name, chunk=32)
    answer = warm.ask(asked)
    assert answer.usage is not None and answer.usage.source == "ssd"
    assert answer.cached == answer.request.query.limit
    assert not any(extent.is_canonical for extent in warm.keeper.store.extents)
    assert_same(answer, cold, is_exact=False)
    warm.check()
    assert workers.start(name, chunk=32, is_exact=True).ask(asked).cached == 0
    workers.flush()
    exact = workers.start(name, chunk=32, is_exact=True).ask(asked)
    assert exact.cached == exact.request.query.limit, "its own cuts took the others' place"
    assert_same(exact, machine(name, keeps=False, chunk=32, is_exact=True).ask(asked), True)
