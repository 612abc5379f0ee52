"""Makes the image reader, the image encoder and their placeholders for a loaded model."""

import dataclasses
import io
import logging
from typing import Final

from PIL import Image

from hearth.shared.errors import RequestError, StartError
from hearth.shared.settings import Settings
from hearth.worker.cache.extent_store import MB
from hearth.worker.cache.prefill_grid import WHOLE, PrefillGrid
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.vision.image_encoding_and_positions import ImageEncoder, checked_vision
from hearth.worker.prompt.images.image_processor import ImageReader, image_marker
from hearth.worker.prompt.tokenise import ImageForm

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
