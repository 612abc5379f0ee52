"""Attack: weights are changed in place, and their times restored, behind KV that lies on disk."""

import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.shared.settings_from_env import Settings, load_settings
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.engine import weights_identity
from hearth.worker.engine.model_loader import load_model
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.setup.kv_setup import cache_root, identify
from hearth.worker.stream.detokenise import Vocabulary
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.socketless_worker import Answer, Machine
from tests.helpers.worker.disk_workers import TEXT, Workers


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path / "kv")
    yield made
    made.kill()


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of files that were written a moment ago are remembered, which helps the attacker."""
    monkeypatch.setattr(weights_identity, "SETTLED_NS", -1)


def restarted(workers: Workers, settings: Settings) -> tuple[PrefixHash, Answer]:
    """Start a worker as the process does, and return its root and what it answers."""
    model = load_model(settings, identify=functools.partial(identify, settings, lambda: False))
    root, marks = cache_root(model, settings), turn_marks(model.tokenizer)
    words = Vocabulary(model.tokenizer)

    def make(_name: str, **rules: object) -> Machine:
        return Machine(model, marks, words, **rules)  # type: ignore[arg-type]

    machine = workers.start("", root, make)
    answer = machine.ask(model.tokenizer.encode(TEXT))
    workers.flush()
    return root, answer


def test_weights_changed_in_place_with_their_times_restored_find_no_kv_of_before(
    tmp_path: Path, workers: Workers
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(fixture_dir("qwen3"), directory)
    environ = {"MODEL_PATH": str(directory), "KV_CACHE_DIR": str(tmp_path / "kv")}
    settings = load_settings(environ, None)
    first, cold = restarted(workers, settings)
    same, warm = restarted(workers, settings)
    assert (same, warm.tokens) == (first, cold.tokens)
    assert warm.cached > 100 and cold.cached == 0

    (weights,) = directory.glob("*.safetensors")
    before = weights.stat()
    with weights.open("r+b") as file:
        file.seek(-2000, os.SEEK_END)
        file.write(bytes(2000))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = weights.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)

    other, answer = restarted(workers, settings)
    assert other != first and answer.cached == 0
