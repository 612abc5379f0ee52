"""Holds the context that is told to what is answered: models of real size, and scaled ones."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.shared.errors import PromptTooLong, StartError
from hearth.shared.settings import load_settings
from hearth.worker.cache.prefill_grid import PrefillGrid
from hearth.worker.engine.forward_memory import ForwardMemory, forward_of
from hearth.worker.engine.mlx_memory import MB
from hearth.worker.engine.system_state import MemoryUse
from hearth.worker.setup.memory_setup import WorkerMemory
from scripts.harness.layouts.imagined_worker import ImaginedWorker
from scripts.harness.layouts.model_layouts import LAYOUTS, ModelLayout
from scripts.harness.mac.mac_hardware import MACS, Mac
from scripts.harness.socketless_worker import CHUNK, Machine, loaded, machine
from tests.helpers.worker.prompt_builders import builder_for
from tests.helpers.worker.watched_memory import held_bytes, ids

SCALE = 96  # tokens of a real context for one of a scaled one
SPARE_TOKENS = 512  # a slot has room for so much of an answer
LIMIT_MB = 64
CONTEXT_MIN = 120_000  # on the largest Mac: of a million, the scores of one forward take most


@functools.cache
def told_on(mac: Mac, model: ModelLayout) -> tuple[ImaginedWorker, int]:
    """Return a worker that has loaded, and its context; 0 where the model does not fit."""
    worker = ImaginedWorker(mac, model, Path("worker-0.sock"))
    try:
        worker.start()
        return worker, worker.context()
    except StartError:
        return worker, 0


# One of each kind of layers; the others are of the same kinds.
BY_DAY = ("Qwen3-4B", "Qwen3.5-35B-A3B", "gpt-oss-20b", "Llama-3.3-70B")
every_model = pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=model.name, marks=() if model.name in BY_DAY else pytest.mark.night)
        for model in LAYOUTS
    ],
)


@every_model
def test_a_model_has_a_mac_and_a_larger_one_tells_no_less(model: ModelLayout) -> None:
    contexts = [told_on(mac, model)[1] for mac in MACS]
    assert contexts == sorted(contexts)
    assert contexts[-1] >= min(model.context_tokens, CONTEXT_MIN)


@every_model
def test_at_real_size_a_prompt_of_the_told_length_is_admitted_alone(model: ModelLayout) -> None:
    for worker, tokens in (told_on(mac, model) for mac in MACS):
        cost = model.slot_bytes(tokens + SPARE_TOKENS)
        guard = worker.memory.guard(worker.forward)
        assert not tokens or not guard.over(cost, tokens), (worker.memory.share.total, tokens)


@every_model
def test_beside_kept_kv_that_is_full_a_prompt_of_the_told_length_is_read(
    model: ModelLayout,
) -> None:
    """Where that takes more than half of the room, kept KV gives up what is missing."""
    for worker, tokens in (told_on(mac, model) for mac in MACS):
        if not tokens:
            continue
        room, memory = worker.room(tokens), worker.memory
        share = 1 + memory.use.overhead
        slot, forward = model.slot_bytes(tokens), worker.forward.bytes_at(tokens)
        kept = int(room.kept_bytes * share)
        missing = memory.use.bytes_used() + kept + int(slot * share) + forward - memory.share.limit
        fits_beside = slot + forward / share <= 2 * room.idle_bytes
        assert missing <= (0 if fits_beside else kept), (memory.share.total, tokens)


# ---------------------------------------------------------------- scaled: real forwards

FIXTURES = {"Qwen3.5-27B": "qwen3_5", "Qwen3.5-35B-A3B": "qwen3_5", "gpt-oss-20b": "gpt_oss"}
FIXTURES |= dict.fromkeys(("gpt-oss-120b", "Gemma-3-27B", "Gemma-4-26B-A4B"), "gpt_oss")


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
        by = fitted.facts.context_by
        self.builder = builder_for(model.tokenizer, self.context, context_by=by)

    def _held(self) -> int:
        kv_bytes = held_bytes(self.machine) if hasattr(self, "machine") else 0
        return self._weights + kv_bytes


@every_model
def test_a_prompt_of_the_told_length_is_answered_and_one_of_5_percent_more_refused(
    model: ModelLayout,
) -> None:
    """The length is that of the smallest Mac that has room for the model, scaled."""
    told = next(tokens for mac in MACS if (tokens := told_on(mac, model)[1])) // SCALE
    worker = ScaledWorker(FIXTURES.get(model.name, "qwen3"), max(300, told))
    longest = worker.context - 1
    assert longest >= told - 1
    for seed in range(2):  # the second finds the first one's KV in its place
        asked = worker.builder.raw(None, ids(longest, seed)).ids
        assert worker.machine.ask(asked, tokens_max=1).reason == "length"
    more = int(longest * 1.05) + 1
    with pytest.raises(PromptTooLong, match=f"{more:,} tokens.*{longest:,}.*MEMORY_LIMIT_MB"):
        worker.builder.raw(None, ids(more, 9))


def test_a_told_prompt_is_answered_whole_though_the_process_takes_more_than_its_arrays() -> None:
    """With a KV of three quarters of the limit, and a process of 15 % more than MLX counts."""
    worker = ScaledWorker("qwen3", 3_000, limit_mb=2, share=1.15)
    asked = worker.machine.submit(ids(worker.context - 20, 1), tokens_max=16)
    while not worker.machine.scheduler.is_idle:
        worker.machine.step()
        worker.use.measure()
    assert asked.usage is not None and asked.usage.completion_tokens == 16
