"""Recurrent states that disk has in 16 bits are fast KV: told so, near cold, not in exact mode."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from hearth.worker.disk.file_format import read
from hearth.worker.disk.file_names import FileKind, FileName, parse
from hearth.worker.kv.quantise_kv import LayerStates
from hearth.worker.kv.serialise_kv import arrays_of_state, state_from
from scripts.harness.socketless_worker import Answer, Machine, machine
from scripts.harness.store_builders import ROOT
from tests.helpers.worker.disk_workers import GB, TEXT, Workers, prompt

HYBRIDS = ("qwen3_5", "falcon_h1")
TOLERANCE = 0.02  # of a log probability


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path / "kv")
    yield made
    made.kill()


def written(workers: Workers, kind: FileKind) -> list[FileName]:
    label = workers.file_store.rule
    names = [parse(path.name, label) for path in workers.directory.rglob("*.safetensors")]
    return [name for name in names if name is not None and name.kind is kind]


def ask(workers: Workers, name: str, ids: list[int], **rules: object) -> tuple[Machine, Answer]:
    """Ask a new worker of the directory, and have all written."""
    asked = workers.start(name, **rules)
    answer = asked.ask(ids)
    asked.keeper.hand_over()
    workers.flush()
    return asked, answer


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_state_of_16_bits_is_told_as_fast_and_its_answer_is_near_a_cold_one(
    workers: Workers, name: str
) -> None:
    ids = prompt(name, TEXT, TEXT)
    _, first = ask(workers, name, ids, state_bits=16)
    assert first.usage is not None and first.usage.canonical_tokens == 0
    states = written(workers, FileKind.STATE)
    assert states and not any(each.is_canonical for each in states)
    assert any(each.is_canonical for each in written(workers, FileKind.ROWS))
    warm = workers.start(name, state_bits=16)
    answer, cold = warm.ask(ids), machine(name, keeps=False).ask(ids)
    assert answer.usage is not None and answer.usage.source == "ssd"
    assert answer.cached == answer.request.query.limit
    assert answer.usage.canonical_tokens < answer.cached
    error = np.abs(answer.logits[0] - cold.logits[0]).max()
    assert 0 < error < TOLERANCE, error
    print(f"{name}: {error:.2g}")
    after = warm.ask(prompt(name, TEXT, TEXT, "And then?"))
    assert after.usage is not None and after.usage.canonical_tokens < answer.cached
    warm.check()
    workers.flush()
    ends = set(after.request.query.names) - set(answer.request.query.names)
    behind = [each for each in written(workers, FileKind.ROWS) if each.end in ends]
    assert behind and not any(each.is_canonical for each in behind), "made over a fast state"


@pytest.mark.parametrize("name", HYBRIDS)
def test_exact_mode_neither_resumes_from_a_fast_state_nor_writes_one(
    workers: Workers, name: str
) -> None:
    ids = prompt(name, TEXT, TEXT)
    ask(workers, name, ids, state_bits=16)
    _, answer = ask(workers, name, ids, state_bits=16, is_exact=True)
    cold = machine(name, keeps=False, is_exact=True).ask(ids)
    assert answer.cached == 0
    assert all(map(np.array_equal, answer.logits, cold.logits))
    better = [each for each in written(workers, FileKind.STATE) if each.is_canonical]
    assert better, "a canonical state takes a fast one's place"
    _, warm = ask(workers, name, ids, state_bits=16, is_exact=True)
    assert warm.cached > 0 and all(map(np.array_equal, warm.logits, cold.logits))


def test_a_fast_state_hangs_from_canonical_rows_in_memory(
    workers: Workers,
) -> None:
    name = HYBRIDS[0]
    ids = prompt(name, TEXT, TEXT)
    ask(workers, name, ids, state_bits=16)
    warm = workers.start(name, state_bits=16)
    answer = warm.ask(ids)
    store = warm.keeper.store
    joint = store.joint(answer.request.query.names[-1])
    assert joint is not None and joint.is_snapshot_fast
    assert joint.arrival is not None and joint.arrival.is_canonical, "its rows are"


def test_a_state_of_16_bits_takes_half_and_comes_back_in_32() -> None:
    wide = mx.random.normal((1, 4, 8, 16)) * 0.3
    state = LayerStates(((wide, None), (wide.astype(mx.bfloat16), wide * 2)))
    halved, whole = arrays_of_state(state, 16), arrays_of_state(state)
    assert [each.name for each in halved] == ["0.0.float32", "0.1.none", "1.0", "1.1.float32"]
    assert [
        a.values.nbytes / max(1, b.values.nbytes) for a, b in zip(halved, whole, strict=True)
    ] == [*(0.5, 0, 1, 0.5)]
    back = state_from(halved)
    for layer, expected in zip(back.layers, state.layers, strict=True):
        for got, kept in zip(layer, expected, strict=True):
            if got is None or kept is None:
                assert got is kept
                continue
            assert got.dtype == kept.dtype
            assert mx.allclose(got, kept, rtol=2**-10, atol=1e-7).item()


@pytest.mark.parametrize("beyond", [70_000.0, float("inf")])
def test_a_state_with_numbers_that_16_bits_lack_stays_in_32(beyond: float) -> None:
    state = LayerStates(((mx.array([1.0, beyond]), mx.array([2.0])),))
    assert [each.dtype for each in arrays_of_state(state, 16)] == ["F32", "F32"]


def test_a_state_of_16_bits_is_read_whatever_the_setting_is_then(
    workers: Workers,
) -> None:
    name = HYBRIDS[0]
    ids = prompt(name, TEXT, TEXT)
    ask(workers, name, ids, state_bits=16)
    for file in written(workers, FileKind.STATE):
        path = workers.directory / ROOT.hex() / file.file_name
        record = read(path, ROOT, file, GB)
        assert not record.is_canonical
        dtypes = {each.dtype for each in record.arrays if each.name.endswith(".float32")}
        assert dtypes == {"F16"}
    _, answer = ask(workers, name, ids)
    assert answer.cached == answer.request.query.limit, "whatever the setting is at the next start"
