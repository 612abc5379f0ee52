"""The meter counts of a real server what was forwarded: held to hand counts and to its usage."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hearth.commands.bench.servers.meter_file import (
    METER_DIR,
    attention_layers,
    layers_of_prompt,
    meter_of,
    read_counts,
)
from scripts.fixtures.fixture_cache import fixture_dir

pytestmark = pytest.mark.night

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
