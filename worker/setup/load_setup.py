"""Loads all that a worker computes with: a model, what drafts for it, adapters, images."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from hearth.shared.settings_from_env import Settings
from hearth.shared.thinking import ThinkingFacts
from hearth.worker.engine.lora.lora_loader import LoraLoader
from hearth.worker.engine.model_loader import LoadedModel, load_model, weights_of
from hearth.worker.formats.shared.output_format import OutputFormat
from hearth.worker.prompt.chat_template import Template
from hearth.worker.prompt.thinking_switches import thinking_switches
from hearth.worker.schedule.model_load_and_prefill_log import StartSteps
from hearth.worker.setup.doctor_setup import is_float16_good
from hearth.worker.setup.draft_model_setup import DraftModelSetup
from hearth.worker.setup.kv_setup import identify
from hearth.worker.setup.memory_setup import WorkerMemory
from hearth.worker.setup.rank_setup import SingleRank
from hearth.worker.setup.vision_setup import VisionParts, make_vision


def load_all(
    settings: Settings,
    steps: StartSteps,
    memory: WorkerMemory,
    is_over: Callable[[], bool],
    rank: SingleRank,
) -> tuple[LoadedModel, VisionParts | None]:
    """Load the weights, what drafts, the adapters, and what encodes images. Inference thread.

    `is_over` says that the process ends, and nobody waits for this.

    Raises:
        StartError: something of it cannot be loaded, or does not fit.
    """
    is_good = functools.partial(is_float16_good, settings)
    name = functools.partial(identify, settings, is_over)
    adapters = LoraLoader(settings, memory.admit)
    drafts = DraftModelSetup(settings, adapters.admit)
    loaded = load_model(
        *(settings, steps.begin, drafts.admit, is_good, name, rank.part()),
        dense_max=memory.dense_bytes_max() - drafts.nbytes,
    )
    loaded = drafts.load(rank.joined(loaded))
    steps.begin("adapters")
    loaded = adapters.load(loaded, name)
    steps.begin("images")
    vision = make_vision(loaded, settings)
    memory.loaded(weight.nbytes for weight in weights_of(loaded))
    output = OutputFormat(loaded.tokenizer)
    facts = dataclasses.replace(
        loaded.facts,
        takes_images=vision is not None,
        thinking=_told(settings, loaded.tokenizer, output),
    )
    return dataclasses.replace(loaded, facts=facts), vision


def _told(settings: Settings, tokenizer: Any, output: OutputFormat) -> ThinkingFacts:
    """Return what the model can be told about thinking, and what it does where nobody says."""
    told = thinking_switches(Template(tokenizer), output.thinks, output.is_thinking_open).told
    is_set = told.has_switch and settings.default_thinking is not None
    default = "on" if settings.default_thinking else "off"
    return dataclasses.replace(told, default=default if is_set else told.default)
