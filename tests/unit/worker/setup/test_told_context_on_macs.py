"""Holds the context that is told to what is answered: twelve real models, and scaled ones."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hearth.shared.errors import PromptTooLong, StartError
from hearth.shared.settings_from_env import load_settings
from hearth.shared.wire_messages import Failed
from hearth.worker.cache.prefill_grid import PrefillGrid
from hearth.worker.engine.footprint import MemoryUse
from hearth.worker.engine.forward_memory import ForwardMemory, forward_of
from hearth.worker.engine.mlx_memory import MB
from hearth.worker.prompt.template_turn_tokens import end_of_turn_ids
from hearth.worker.setup.memory_setup import WorkerMemory
from hearth.worker.setup.prompt_and_session_setup import make_builder
from scripts.bench.mac_memory import context_table, room_table
from scripts.harness.layouts.imagined_worker import ImaginedWorker
from scripts.harness.layouts.model_layouts import LAYOUTS, ModelLayout, layout
from scripts.harness.mac.mac_hardware import GB, MACS, Mac
from scripts.harness.socketless_worker import CHUNK, Machine, loaded, machine, marks

SCALE = 96  # tokens of a real context for one of a scaled one
SPARE_TOKENS = 512  # a slot has room for so much of an answer
LIMIT_MB = 64


@functools.cache
def told_on(mac: Mac, model: ModelLayout) -> tuple[ImaginedWorker, int]:
    """Return a worker that has loaded, and its context; 0 where the model does not fit."""
    worker = ImaginedWorker(mac, model, Path("worker-0.sock"))
    try:
        worker.start()
        return worker, worker.context()
    except StartError:
        return worker, 0


def test_every_model_has_a_mac_and_a_larger_mac_tells_no_less() -> None:
    for model in LAYOUTS:
        contexts = [told_on(mac, model)[1] for mac in MACS]
        assert contexts == sorted(contexts) and contexts[-1] == model.context_tokens


@pytest.mark.parametrize("mac", MACS, ids=lambda mac: f"{mac.memory_gb} GB")
def test_at_real_size_a_prompt_of_the_told_length_is_admitted_alone(mac: Mac) -> None:
    for model in LAYOUTS:
        worker, tokens = told_on(mac, model)
        cost = model.slot_bytes(tokens + SPARE_TOKENS)
        guard = worker.memory.guard(worker.forward)
        assert not tokens or not guard.over(cost, tokens), (model.name, tokens)


@pytest.mark.parametrize("mac", MACS, ids=lambda mac: f"{mac.memory_gb} GB")
def test_beside_kept_kv_that_is_full_a_prompt_of_the_told_length_is_read(mac: Mac) -> None:
    """Where that takes more than half of the room, kept KV gives up what is missing."""
    for model in LAYOUTS:
        worker, tokens = told_on(mac, model)
        if not tokens:
            continue
        room, memory = worker.room(tokens), worker.memory
        share = 1 + memory.use.overhead
        slot, forward = model.slot_bytes(tokens), worker.forward.bytes_at(tokens)
        kept = int(room.kept_bytes * share)
        held = memory.use.bytes_used() + kept + int(slot * share) + forward
        missing = held - memory.share.limit
        fits_beside = slot + forward / share <= 2 * room.idle_bytes
        assert missing <= (0 if fits_beside else kept), (model.name, tokens)


def test_the_printed_tables_have_what_is_told() -> None:
    (mac,) = [mac for mac in MACS if mac.memory_gb == 64]
    model = layout("Llama-3.3-70B")
    worker, tokens = told_on(mac, model)
    assert f"| 64 GB | {tokens:,} |" in context_table([mac], [model])
    assert f"| 64 GB | {worker.room(tokens).kept_bytes / GB:.1f} |" in room_table([mac], [model])


# ---------------------------------------------------------------- scaled: real forwards

FIXTURES = {"Qwen3.5-27B": "qwen3_5", "Qwen3.5-35B-A3B": "qwen3_5", "gpt-oss-20b": "gpt_oss"}
FIXTURES |= {"gpt-oss-120b": "gpt_oss", "Gemma-3-27B": "gpt_oss"}


class ScaledWorker:
    """A tiny model of a real one's layout, with room for a context of `tokens`."""

    def __init__(
        self, name: str, tokens: int, limit_mb: int = LIMIT_MB, share: float = 1.0
    ) -> None:
        """`share` is what the process takes of what MLX counts; over 1 attention is fused."""
        model = loaded(name, tiny=True)
        plain = machine(name, tiny=True)
        slot_bytes = plain.keeper.uncached.cold_bytes
        forward = forward_of(model, PrefillGrid(CHUNK)) if share == 1.0 else ForwardMemory()
        settings = load_settings({"MEMORY_LIMIT_MB": str(limit_mb)}, None)
        memory = WorkerMemory(settings, "ipc://worker-0.sock")
        room = slot_bytes(tokens) + forward.bytes_at(tokens)
        self._weights = int((limit_mb * MB * 19 // 20 - room) / share)
        self.use = MemoryUse(lambda: int(share * self._held()), self._held, lambda: 0)
        memory.use = self.use
        assert self._weights > 0, self._weights
        facts = replace(model.facts, context_tokens=1_000_000)
        fitted = memory.fit(replace(model, facts=facts), slot_bytes, forward)
        self.context: int = fitted.facts.context_tokens
        self.machine: Machine = machine(name, tiny=True, memory=memory.guard(forward))
        ends = end_of_turn_ids(model.tokenizer, model.generation_config)
        self.builder: Any = make_builder(
            model.tokenizer,
            marks(name),
            ends,
            self.context,
            load_settings({}, None),
            context_by=fitted.facts.context_by,
        )

    def _held(self) -> int:
        if not hasattr(self, "machine"):
            return self._weights
        keeper = self.machine.keeper
        slots = sum(map(keeper.slot_bytes, keeper.slots))
        return int(self._weights + keeper.store.budget.bytes_used + slots)

    def ids(self, count: int, seed: int) -> list[int]:
        ids: list[int] = np.random.default_rng(seed).integers(5, 200, count).tolist()
        return ids


@pytest.mark.parametrize("model", LAYOUTS, ids=lambda model: model.name)
def test_a_prompt_of_the_told_length_is_answered_and_one_of_5_percent_more_refused(
    model: ModelLayout,
) -> None:
    """The length is that of the smallest Mac that has room for the model, scaled."""
    told = next(tokens for mac in MACS if (tokens := told_on(mac, model)[1])) // SCALE
    worker = ScaledWorker(FIXTURES.get(model.name, "qwen3"), max(300, told))
    longest = worker.context - 1
    assert longest >= told - 1
    for seed in range(2):  # the second finds the first one's KV in its place
        ids = worker.builder.raw(None, worker.ids(longest, seed)).ids
        assert worker.machine.ask(ids, tokens_max=1).reason == "length"
    more = int(longest * 1.05) + 1
    with pytest.raises(PromptTooLong) as refused:
        worker.builder.raw(None, worker.ids(more, 9))
    assert f"{more:,} tokens" in str(refused.value) and f"{longest:,}" in str(refused.value)


def test_a_told_prompt_is_answered_whole_though_the_process_takes_more_than_its_arrays() -> None:
    """With a KV of three quarters of the limit, and a process of 15 % more than MLX counts."""
    worker = ScaledWorker("qwen3", 3_000, limit_mb=2, share=1.15)
    asked = worker.machine.submit(worker.ids(worker.context - 20, 1), tokens_max=16)
    while not worker.machine.scheduler.is_idle:
        worker.machine.step()
        worker.use.measure()
    assert asked.usage is not None and asked.usage.completion_tokens == 16


def test_what_the_context_let_through_and_memory_has_no_room_for_is_refused_with_figures() -> None:
    worker = ScaledWorker("qwen3", 1_000)
    asked = worker.machine.submit(worker.ids(9_000, 1), tokens_max=1)
    events = []
    while not worker.machine.scheduler.is_idle:
        events += worker.machine.step()
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.request_id == asked.request.request_id
    for figure in ("9,000 tokens", "0.00 GB", "MEMORY_LIMIT_MB"):
        assert figure in failed.text


def test_a_prompt_that_memory_refuses_is_told_what_would_give_it_room() -> None:
    worker = ScaledWorker("qwen3", 1_000)
    with pytest.raises(PromptTooLong, match="MEMORY_LIMIT_MB"):
        worker.builder.raw(None, worker.ids(worker.context, 9))
