"""Loads all that a worker computes with: a model, what drafts for it, adapters, images."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import replace

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import Settings
from hearth.worker.engine.decode.draft_model_loader import find_draft_model, load_draft_model
from hearth.worker.engine.lora.lora_loader import LoraLoader
from hearth.worker.engine.model_loader import LoadedModel, load_model, weights_of
from hearth.worker.formats.shared.output_format import OutputFormat
from hearth.worker.kv.layer_adapters import raw_rows
from hearth.worker.prompt.chat_template import Template
from hearth.worker.prompt.thinking_switches import thinking_switches
from hearth.worker.schedule.model_load_and_prefill_log import StartSteps
from hearth.worker.setup.doctor_setup import is_float16_good
from hearth.worker.setup.kv_setup import identify, is_exact
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
    template = Template(loaded.tokenizer)
    told = thinking_switches(template, output.thinks, output.is_thinking_open).told
    if told.has_switch and settings.default_thinking is not None:
        told = dataclasses.replace(told, default="on" if settings.default_thinking else "off")
    facts = dataclasses.replace(loaded.facts, takes_images=vision is not None, thinking=told)
    return dataclasses.replace(loaded, facts=facts), vision


class DraftModelSetup:
    """Finds a draft model before the model is loaded, and loads it behind that.

    Owner: the inference thread.
    """

    def __init__(self, settings: Settings, admit: Callable[[int], None]) -> None:
        """`admit` is called with the bytes of all weights before they are read.

        Raises:
            StartError: DRAFT_MODEL names nothing that can draft.
        """
        self._settings = settings
        self._admit = admit
        self._found = find_draft_model(settings)

    @property
    def nbytes(self) -> int:
        """What the draft model's weights take at most."""
        return self._found.nbytes if self._found is not None else 0

    def admit(self, nbytes: int) -> None:
        """Make ready for a model's weights of `nbytes`, and for those of the draft model."""
        self._admit(nbytes + self.nbytes)

    def load(self, loaded: LoadedModel) -> LoadedModel:
        """Return the model with what drafts for it, as it is where DRAFT_MODEL is empty.

        Raises:
            StartError: it does not fit the model, or nothing may be drafted for that.
        """
        if self._found is None:
            return loaded
        if is_exact(loaded, self._settings):
            raise StartError(
                f"DRAFT_MODEL is {self._found.source!r}, and in exact mode nothing is drafted. "
                "Leave DRAFT_MODEL empty, or set CACHE_EXACT=false."
            )
        return replace(loaded, draft_model=load_draft_model(self._found, loaded, raw_rows))
