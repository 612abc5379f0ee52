"""Loads everything that a worker computes with: model, draft model, adapters, image encoder."""

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

FEATURES_BYTES_MAX: Final = 256 * MB  # encoded images kept for other conversations

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class VisionParts:
    """Reads, encodes and places the images of a model that takes images.

    The image thread owns `reader`, the inference thread `encoder`, and the prompt threads `form`.
    """

    reader: ImageReader
    encoder: ImageEncoder
    form: ImageForm

    def forget(self) -> None:
        """Release all cached images: pixels and encoded rows. Inference thread."""
        self.reader.forget()
        self.encoder.release()


def make_vision(loaded: LoadedModel, settings: Settings) -> VisionParts | None:
    """Return the vision parts; None for a text-only model, or with a warning if a trial fails.

    The trial encodes a small image. Inference thread.
    """
    if loaded.vision is None:
        return None
    marker = image_marker(loaded.tokenizer, loaded.vision.processor)
    if marker is None:
        log.warning("images are refused: the chat template does not say how it shows one")
        return None
    file = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(file, "PNG")  # pixels that differ
    try:
        reader = ImageReader(loaded.vision.processor, loaded.config, marker)
        probe = reader.read("probe", file.getvalue())
    except (StartError, RequestError) as error:
        log.warning("images are refused: %s", error)
        return None
    reader.counts.clear()  # the trial image does not count
    encoder = checked_vision(loaded, probe, FEATURES_BYTES_MAX)
    if encoder is None:
        return None
    return VisionParts(reader, encoder, ImageForm(reader.before, reader.after))


def load_all(
    settings: Settings,
    steps: StartSteps,
    memory: WorkerMemory,
    is_over: Callable[[], bool],
    rank: SingleRank,
) -> tuple[LoadedModel, VisionParts | None]:
    """Load the weights, draft model, adapters and image encoder. Inference thread.

    `is_over` returns whether the process ends; if so, the load is abandoned.

    Raises:
        StartError: a part cannot be loaded, or does not fit.
    """
    is_good = functools.partial(is_float16_good, settings)
    identity_of = functools.partial(identify, settings, is_over)
    adapters = LoraLoader(settings, memory.admit)
    checkpoint = find_draft_model(settings)
    draft_bytes = checkpoint.nbytes if checkpoint is not None else 0
    loaded = load_model(
        settings,
        steps.begin,
        lambda nbytes: adapters.admit(nbytes + draft_bytes),
        is_good,
        identity_of,
        rank.part(),
        dense_max=memory.dense_bytes_max() - draft_bytes,
    )
    loaded = with_draft_model(rank.joined(loaded), checkpoint, settings)
    steps.begin("adapters")
    loaded = adapters.load(loaded, identity_of)
    steps.begin("images")
    vision = make_vision(loaded, settings)
    memory.loaded(weight.nbytes for weight in weights_of(loaded))
    output = OutputFormat(loaded.tokenizer)
    template = Template(loaded.tokenizer)
    thinking = thinking_switches(template, output.thinks, output.is_thinking_open).facts
    if thinking.has_switch and settings.default_thinking is not None:
        thinking = dataclasses.replace(
            thinking, default="on" if settings.default_thinking else "off"
        )
    facts = dataclasses.replace(loaded.facts, takes_images=vision is not None, thinking=thinking)
    return dataclasses.replace(loaded, facts=facts), vision


def with_draft_model(
    loaded: LoadedModel, checkpoint: DraftCheckpoint | None, settings: Settings
) -> LoadedModel:
    """Return the model with its draft model; without changes if DRAFT_MODEL is empty.

    Raises:
        StartError: the draft model does not fit the model, or exact mode forbids drafts.
    """
    if checkpoint is None:
        return loaded
    if is_exact(loaded, settings):
        raise StartError(
            f"DRAFT_MODEL is {checkpoint.source!r}, and in exact mode nothing is drafted. "
            "Leave DRAFT_MODEL empty, or set CACHE_EXACT=false."
        )
    return replace(loaded, draft_model=load_draft_model(checkpoint, loaded, raw_rows))
