"""The command hearth bench runs whole on two real servers; its meter counts all forwards."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hearth.commands.bench.results import Results
from hearth.commands.bench.rounds import command
from hearth.commands.bench.servers.meter_file import (
    METER_DIR,
    attention_layers,
    layers_of_prompt,
    meter_of,
    read_counts,
)
from hearth.commands.bench.statistics import read_over
from hearth.commands.bench.workload import Scale
from scripts.fixtures.fixture_cache import fixture_dir

pytestmark = pytest.mark.night

SCALES = {"smallest": Scale("smallest", 40, 2, 60, 200, 60, 8, 1)}
WORKLOADS = "linear,answers-cold,restart,kill"
# What the command plays for them: what is asked again was read before.
PLAYED = ["linear", "answers", "restart", "before-kill", "kill", "answers-cold"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


def bench(place: Path, *more: str) -> int:
    given = ["--model", str(fixture_dir("qwen3", tiny=True)), "--servers", "hearth,mlx_lm"]
    given += ["--scale", "smallest", "--workloads", WORKLOADS, "--json", str(place / "a.json")]
    return command.main([*given, *more], SCALES)


@pytest.fixture(scope="module")
def made(place: Path) -> Results:
    assert bench(place) == 0
    return Results.load(place / "a.json")


def test_every_workload_is_measured_on_both_servers(made: Results) -> None:
    assert list(made.servers) == ["hearth", "mlx_lm"]
    assert all(facts.is_metered and facts.version for facts in made.servers.values())
    (model,) = made.models
    assert list(made.places()) == [(model, name, each) for name in made.servers for each in PLAYED]
    for place in made.places():
        cell = made.cell(*place)
        assert cell.errors == {} and cell.rounds == [0]
        assert cell.numbers("failed") == [0] and cell.numbers("requests")[0] >= 1


def test_a_restart_and_a_crash_cost_hearth_less_than_the_prompt(made: Results) -> None:
    """What the other keeps in memory alone is gone; what Hearth wrote is not."""
    (model,) = made.models
    for workload in ("restart", "kill"):
        own = read_over(made, model, "hearth", (workload,), "prompt_tokens")
        other = read_over(made, model, "mlx_lm", (workload,), "prompt_tokens")
        assert own is not None and other is not None and own < 0.5 < 0.9 < other


def test_what_is_shared_names_no_place_of_the_user(place: Path, made: Results) -> None:
    for file in ("a.json", "a.html"):
        text = (place / file).read_text()
        assert str(Path.home()) not in text and str(place) not in text
        assert not re.search(r"/(root|home|Users|tmp|private)/", text)
    assert made.command.startswith("hearth bench --model qwen3-tiny")
    assert "<html" in (place / "a.html").read_text()


def test_what_is_there_is_not_measured_again(
    place: Path, made: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(place) == 0
    assert "0 of 2 visits are left to be played." in capsys.readouterr().out
    assert Results.load(place / "a.json").cells == made.cells


# Reads 100 tokens in two chunks and one more alone, then decodes 5: eight forwards.
BY_HAND = """
import sys
import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
model, _ = load(sys.argv[1])
cache = make_prompt_cache(model)
for length in (60, 40, 1, 1, 1, 1, 1, 1):
    mx.eval(model(mx.array([[7] * length]), cache=cache))
"""


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gpt_oss"])
def test_forwards_that_are_made_by_hand_are_counted(name: str, tmp_path: Path) -> None:
    model = fixture_dir(name, tiny=True)
    environment = {
        **{each: os.environ[each] for each in ("PATH", "LD_PRELOAD", "HOME") if each in os.environ},
        "PYTHONPATH": str(METER_DIR),
        "METER_DIR": str(tmp_path),
    }
    subprocess.run(
        [sys.executable, "-c", BY_HAND, str(model)], env=environment, check=True, timeout=120
    )
    counts = read_counts(tmp_path)
    layers = attention_layers(model)
    assert layers == {"qwen3": 2, "qwen3_5": 1, "gpt_oss": 2}[name]
    for known in (layers, None):
        meter = meter_of(counts, layers_of_prompt({}, counts, 100, known))
        assert meter is not None and (meter.read_tokens, meter.forwards) == (100, 8)
