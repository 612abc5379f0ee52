"""Loads all that a worker computes with: a model, what drafts for it, adapters, images."""

import dataclasses
import functools
import io
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from PIL import Image

from hearth.shared.errors import RequestError, StartError
from hearth.shared.settings import Settings
from hearth.worker.cache.extent_store import MB
from hearth.worker.cache.prefill_grid import WHOLE, PrefillGrid
from hearth.worker.engine.decode.draft_model_loader import (
    DraftCheckpoint,
    find_draft_model,
    load_draft_model,
)
from hearth.worker.engine.lora.lora_loader import LoraLoader
from hearth.worker.engine.model_loader import LoadedModel, load_model, weights_of
from hearth.worker.engine.vision.image_encoding_and_positions import ImageEncoder, checked_vision
from hearth.worker.formats.shared.output_format import OutputFormat
from hearth.worker.kv.layer_adapters import raw_rows
from hearth.worker.prompt.chat_template import Template
from hearth.worker.prompt.images.image_processor import ImageReader, image_marker
from hearth.worker.prompt.template_capabilities import thinking_switches
from hearth.worker.prompt.tokenise import ImageForm
from hearth.worker.setup.doctor_setup import is_float16_good
from hearth.worker.setup.kv_setup import identify, is_exact
from hearth.worker.setup.memory_setup import WorkerMemory
from hearth.worker.setup.rank_setup import SingleRank
from hearth.worker.threads.start_worker import StartSteps

FEATURES_BYTES_MAX: Final = 256 * MB  # of encoded images kept for other conversations

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class VisionParts:
    """Reads, encodes and places the images of a model that takes some.

    Owner: the image thread has `reader`, the inference thread `encoder`, the prompt thread `form`.
    """

    reader: ImageReader
    encoder: ImageEncoder
    form: ImageForm

    def forget(self) -> None:
        """Give up all that is kept of images: pixels, rows. Inference thread."""
        self.reader.forget()
        self.encoder.release()


def make_vision(loaded: LoadedModel, settings: Settings) -> VisionParts | None:
    """Return what reads this model's images; None where it takes none, with a warning if it might.

    Inference thread, which encodes a small image of our own here.
    """
    if loaded.vision is None:
        return None
    marker = image_marker(loaded.tokenizer, loaded.vision.processor)
    if marker is None:
        log.warning("images are refused: the chat template does not say how it shows one")
        return None
    file = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(file, "PNG")  # there is something to see
    try:
        reader = ImageReader(loaded.vision.processor, loaded.config, marker)
        probe = reader.read("probe", file.getvalue())
    except (StartError, RequestError) as error:
        log.warning("images are refused: %s", error)
        return None
    reader.counts.clear()  # of images that somebody showed
    encoder = checked_vision(loaded, probe, FEATURES_BYTES_MAX)
    if encoder is None:
        return None
    return VisionParts(reader, encoder, ImageForm(reader.before, reader.after))


def image_grid(grid: PrefillGrid, vision: VisionParts | None) -> PrefillGrid:
    """Return where forwards amid an image end, whose prompts are read in the steps of `grid`."""
    splits = vision is None or vision.encoder.splits_images
    return grid if splits else WHOLE


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
    found = find_draft_model(settings)
    draft_bytes = found.nbytes if found is not None else 0
    loaded = load_model(
        settings,
        steps.begin,
        lambda nbytes: adapters.admit(nbytes + draft_bytes),
        *(is_good, name, rank.part()),
        dense_max=memory.dense_bytes_max() - draft_bytes,
    )
    loaded = with_draft_model(rank.joined(loaded), found, settings)
    steps.begin("adapters")
    loaded = adapters.load(loaded, name)
    steps.begin("images")
    vision = make_vision(loaded, settings)
    memory.loaded(weight.nbytes for weight in weights_of(loaded))
    output = OutputFormat(loaded.tokenizer)
    template = Template(loaded.tokenizer)
    told = thinking_switches(template, output.thinks, output.is_thinking_open).facts
    if told.has_switch and settings.default_thinking is not None:
        told = dataclasses.replace(told, default="on" if settings.default_thinking else "off")
    facts = dataclasses.replace(loaded.facts, takes_images=vision is not None, thinking=told)
    return dataclasses.replace(loaded, facts=facts), vision


def with_draft_model(
    loaded: LoadedModel, found: DraftCheckpoint | None, settings: Settings
) -> LoadedModel:
    """Return the model with what drafts for it, as it is where DRAFT_MODEL is empty.

    Raises:
        StartError: it does not fit the model, or nothing may be drafted for that.
    """
    if found is None:
        return loaded
    if is_exact(loaded, settings):
        raise StartError(
            f"DRAFT_MODEL is {found.source!r}, and in exact mode nothing is drafted. "
            "Leave DRAFT_MODEL empty, or set CACHE_EXACT=false."
        )
    return replace(loaded, draft_model=load_draft_model(found, loaded, raw_rows))
