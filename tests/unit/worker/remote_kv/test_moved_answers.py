"""An answer that goes on from KV of another machine is the one that a cold worker gives."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hearth.worker.disk.file_format import Array, Record
from hearth.worker.disk.file_names import FileKind, FileName
from scripts.harness.socketless_worker import machine
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.remote_kv.joined_workers import Joined, JoinedWorkers
from tests.helpers.worker.kv_prompts import KINDS, follow, prompt


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[JoinedWorkers]:
    made = JoinedWorkers(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("name", KINDS)
def test_a_session_that_moves_goes_on_from_what_its_first_worker_kept(
    joined: JoinedWorkers, name: str
) -> None:
    one, two = joined.add(name, "M3"), joined.add(name, "M4")
    first = one.ask(prompt(name, 150, 400))
    ids = follow(name, first.request.ids, first.tokens, 40)
    moved, cold = two.ask(ids), machine(name, keeps=False, tiny=True).ask(ids)
    assert moved.cached == first.request.query.limit > 500
    same_tokens(moved, cold)
    np.testing.assert_allclose(moved.logits, cold.logits, atol=1e-4)
    assert moved.usage is not None and moved.usage.source == "ssd"
    report = two.exchange.report()
    assert report is not None and report["counts"]["moved_tokens"] == moved.cached
    two.machine.check()


def test_another_key_reads_the_same_prompt_anew(joined: JoinedWorkers) -> None:
    name = "qwen3"
    one, two = joined.add(name, "M3"), joined.add(name, "M4")
    ids = prompt(name, 150, 400)
    one.ask(ids)
    assert two.ask(ids, key="theirs").cached == 0
    assert "sent_bytes" not in one.exchange.report()["counts"]  # type: ignore[index]


def test_an_exact_worker_takes_nothing_from_another_chip_and_all_from_its_own_kind(
    joined: JoinedWorkers,
) -> None:
    name = "qwen3_5"
    one, other, same = (joined.add(name, chip, is_exact=True) for chip in ("M3", "M4", "M3"))
    ids = prompt(name, 150, 400)
    first = one.ask(ids)
    assert other.ask(ids).cached == 0
    joined.relay.forget(other.worker_id)
    again = same.ask(ids)
    assert again.cached == first.request.query.limit
    assert again.tokens == first.tokens
    assert all(np.array_equal(a, b) for a, b in zip(again.logits, first.logits, strict=True))


def odd(record: Record, how: str) -> Record:
    """Return a record whose arrays are of another type or shape than the model's."""
    arrays = [
        Array(array.name, "F16", array.values.astype("<f2"))
        if how == "type"
        else Array(array.name, array.dtype, np.ascontiguousarray(array.values[..., 1:]))
        for array in record.arrays
    ]
    return replace(record, arrays=tuple(arrays))


def spoil(link: Joined, kind: FileKind, how: str) -> int:
    """Have a worker's files of a kind be odd ones; return how many there are."""
    store, count = link.workers.file_store, 0
    store.refresh()
    joints = {joint.name for joint in link.machine.keeper.store.joints}
    names: set[FileName] = {name for joint in joints for name in store.at(joint)}
    for name in (name for name in names if name.kind is kind):
        record = store.get(name)
        assert record is not None
        store.remove(name)
        assert store.put(odd(record, how))
        count += 1
    return count


@pytest.mark.parametrize("how", ["type", "shape"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3", FileKind.ROWS),
        ("gpt_oss", FileKind.WINDOW),
        ("qwen3_5", FileKind.STATE),
    ],
)
def test_kv_of_other_types_or_shapes_than_the_models_is_read_anew(
    joined: JoinedWorkers, name: str, kind: FileKind, how: str
) -> None:
    one, two = joined.add(name, "M3"), joined.add(name, "M4")
    ids = prompt(name, 150, 400)
    first = one.ask(ids)
    assert spoil(one, kind, how)
    same_tokens(two.ask(ids), first)
    assert two.machine.keeper.disk.counts["recalls_unreadable"] == 1
