"""The meter counts of a real server what was forwarded: held to hand counts and to its usage."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.commands.bench.server import Memory
from hearth.commands.bench.servers.known_servers import SERVERS
from hearth.commands.bench.servers.meter_file import (
    METER_DIR,
    attention_layers,
    layers_of_prompt,
    meter_of,
    read_counts,
)
from hearth.commands.bench.servers.started_server import StartedServer, started
from hearth.commands.replay.player import Row, replay
from hearth.commands.replay.traces import CHAT_PATH, Captured
from scripts.fixtures.fixture_cache import fixture_dir

TEXT = "What is said: " + " ".join(f"thing{number}" for number in range(120))
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


async def asked(running: StartedServer, text: str, tokens_max: int = 1) -> tuple[Row, float, float]:
    """Ask; return how it went, what was read for it, and in how many forwards."""
    body = {"messages": [{"role": "user", "content": text}]}
    question = Captured("t", "chat", CHAT_PATH, {}, body, "", 0.0, 0.0)
    before = running.meter()
    rows, _ = await replay([question], replace(running.target, tokens_max=tokens_max))
    await running.rest()
    after = running.meter()
    assert before is not None and after is not None
    return rows[0], after.read_tokens - before.read_tokens, after.forwards - before.forwards


def test_hearth_reads_what_it_says_and_finds_it_again_after_a_kill(tmp_path: Path) -> None:
    model = fixture_dir("qwen3", tiny=True).resolve()

    async def run(is_killed: bool) -> tuple[Row, float]:
        server = SERVERS["hearth"]
        async with started(server, model, tmp_path, Memory.DEFAULT, 50) as running:
            row, read, _ = await asked(running, TEXT)
            again, reread, _ = await asked(running, TEXT)
            assert row.tokens is not None and again.tokens is not None and row.ids is not None
            assert (read, reread) == (row.tokens.prefilled, again.tokens.prefilled)
            assert row.tokens.prompt == len(row.ids) > 300 and reread < 32
            if is_killed:
                await asyncio.sleep(1.0)  # it writes at rest
                await running.kill()
                assert running.pids() == []
        return row, read

    row, read = asyncio.run(run(True))
    assert row.tokens is not None and read == row.tokens.prompt, "it was fresh"
    _, read = asyncio.run(run(False))
    assert read < 32, "and the same home has it"


def test_mlx_lm_reads_a_prompt_but_for_what_it_reads_alone(tmp_path: Path) -> None:
    model = fixture_dir("qwen3", tiny=True).resolve()

    async def run(memory: Memory) -> tuple[float, float, float]:
        server = SERVERS["mlx_lm"]
        async with started(server, model, tmp_path, memory, 50) as running:
            row, read, _ = await asked(running, TEXT)
            assert row.tokens is not None
            again, reread, few = await asked(running, TEXT, 4)
            longer, _, many = await asked(running, TEXT, 12)
            assert again.tokens is not None and longer.tokens is not None
            if memory is Memory.DEFAULT:
                assert many - few == longer.tokens.completion - again.tokens.completion
            return row.tokens.prompt, read, reread

    prompt, read, reread = asyncio.run(run(Memory.DEFAULT))
    assert prompt - 12 <= read <= prompt and reread < 16
    prompt, read, reread = asyncio.run(run(Memory.NONE))
    assert prompt - 4 <= min(read, reread), "its cache is off"
