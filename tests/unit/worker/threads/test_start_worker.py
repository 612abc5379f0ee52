"""Checks what a worker tells of its start."""

from dataclasses import dataclass

import pytest

from hearth.shared.settings import load_settings
from hearth.worker.engine.model_loader import load_model
from hearth.worker.threads import start_worker
from hearth.worker.threads.start_worker import StartSteps
from scripts.fixtures.fixture_cache import fixture_dir

WAIT_S = 60.0


@dataclass
class Watch:
    """A clock that is set by hand."""

    now: float

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch(0.0)
    monkeypatch.setattr(start_worker, "time", made)
    return made


def test_loading_tells_its_steps_and_what_the_weights_will_take() -> None:
    told: list[tuple[str, int]] = []
    directory = fixture_dir("qwen3")
    settings = load_settings({"MODEL_PATH": str(directory)}, None)
    load_model(settings, lambda *step: told.append(step))
    (weights,) = directory.glob("*.safetensors")
    assert told == [("files", 0), ("weights", weights.stat().st_size), ("hashes", 0)]


def test_a_heartbeat_tells_the_step_and_how_much_of_it_is_there(watch: Watch) -> None:
    held = 3 << 20
    steps = StartSteps(lambda: held, every_s=WAIT_S)
    assert (steps.heartbeat().state, steps.heartbeat().step) == ("loading", "")
    steps.begin("files")
    watch.now += 2.5
    beat = steps.heartbeat()
    assert (beat.step, beat.step_s, beat.step_bytes, beat.held_bytes) == ("files", 2.5, 0, 0)
    steps.begin("weights", 7 << 20)
    assert (steps.heartbeat().held_bytes, steps.heartbeat().step_bytes) == (3 << 20, 7 << 20)
    held = 9 << 20
    assert steps.heartbeat().held_bytes == 7 << 20, "no more than the step brings"
    steps.end()
    assert steps.heartbeat().step == ""
