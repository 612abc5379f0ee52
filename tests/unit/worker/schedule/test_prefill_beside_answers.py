"""Compares a prompt's KV that was read beside answers with a quiet one's, on a tiny model."""

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from hearth.shared.settings import load_settings
from hearth.worker.kv.kv_transfer import LiveSlot
from hearth.worker.schedule.scheduler_config import SchedulerConfig
from hearth.worker.setup.kv_setup import BESIDE_GOAL_S, with_goal_beside
from scripts.harness.socketless_worker import Machine, loaded, machine
from tests.helpers.worker.kv_prompts import prompt

CHUNK = 64
BESIDE = {"beside_goal_s": 1e-9, "beside_tokens_min": 16}  # as short as may be
LENGTHS = (90, 200)


def beside_streams(warm: Machine, ids: list[int], quiet_from: int = 1 << 30) -> Any:
    """Ask `ids` beside three answers, which end once so many tokens are read; return its answer."""
    streams = [
        warm.submit(prompt("qwen3", 20, 10, seed=number), tokens_max=400) for number in range(3)
    ]
    warm.run(until=lambda: len(warm.scheduler._decoding) == 3)
    asked = warm.submit(ids, tokens_max=4)
    warm.run(until=lambda: asked.request.position >= quiet_from or asked.usage is not None)
    assert asked.usage is None or all(stream.usage is None for stream in streams)
    for stream in streams:
        stream.request.lease.is_cancelled = True
    warm.run()
    return warm.settled(asked)


def slot_of(warm: Machine, ids: list[int]) -> LiveSlot:
    (slot,) = [s for s in warm.keeper.slots if s.tokens[: len(ids)].tolist() == ids]
    return slot


def canonical_ends(warm: Machine, ids: list[int]) -> dict[int, bool]:
    """Return the ends of the prompt's kept extents, and which of them are canonical."""
    found = {}
    for node in warm.keeper.store.nodes:
        if node.arrival is not None and node.position <= len(ids):
            path = [node]
            while path[-1].arrival is not None:
                path.append(path[-1].arrival.start)
            tokens = np.concatenate([j.arrival.tokens for j in reversed(path) if j.arrival])
            if tokens.tolist() == ids[: node.position]:
                found[node.position] = node.arrival.is_canonical
    return found


@pytest.mark.parametrize("quiet_from", [1 << 30, 100])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_what_was_read_in_shorter_forwards_and_what_follows_it_is_told_fast(
    name: str, quiet_from: int
) -> None:
    ids = prompt(name, *LENGTHS)
    busy = machine(name, tiny=True, chunk=CHUNK, **BESIDE)
    asked = beside_streams(busy, ids, quiet_from)
    ends = canonical_ends(busy, ids)
    assert ends and not any(ends.values()), ends
    state = asked.request.prefill
    assert state is not None and state.is_cut_beside and not slot_of(busy, ids).canonical_cuts


def test_a_goal_is_set_on_gpus_for_what_may_be_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SchedulerConfig(4, lambda _: [])
    model = loaded("qwen3", tiny=True)
    plain, exact = load_settings({}, None), load_settings({"CACHE_EXACT": "true"}, None)
    assert with_goal_beside(config, model, plain) is config, "this machine has a CPU alone"
    for module in ("setup.kv_setup", "engine.prefill_lengths"):
        monkeypatch.setattr(f"hearth.worker.{module}.backend", lambda: "metal")
    assert with_goal_beside(config, model, exact) is config
    made = with_goal_beside(config, model, plain)
    assert (made.beside_goal_s, made.beside_tokens_min) == (BESIDE_GOAL_S, 128)
    assert dataclasses.replace(made, beside_goal_s=0.0) == config
    experts = with_goal_beside(config, loaded("gpt_oss", tiny=True), plain)
    assert experts.beside_tokens_min == 256
    assert mx.default_device() == mx.Device(mx.cpu)
