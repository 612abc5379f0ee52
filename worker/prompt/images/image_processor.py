"""Decodes image files, runs the model's processor on the images, and remembers the results.

No other module decodes images, because a file is untrusted until it is decoded. The first bytes
give the format, and only the class of Pillow that reads this format is called, so that no other
decoder ever runs. The size that a file claims is checked before any pixel is decoded. A processor's
outputs leave this module as NumPy arrays. This module itself imports no MLX.
"""

import functools
import io
import logging
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from hearth.shared.errors import RequestError, StartError
from hearth.shared.memory_by_owner import MemoryByOwner
from hearth.worker.cache.image_keys import PromptImage, identity_of

log = logging.getLogger(__name__)

# Pillow warns, for example, of skipped metadata. Operators need no such warnings.
warnings.filterwarnings("ignore", module=r"PIL\.")

PIXELS_MAX: Final = 40_000_000
SEGMENTS_MAX: Final = 500  # the limit in libjpeg's own fuzzers; a camera's file has some 10

_READERS: Final[dict[str, Callable[[io.BytesIO], Image.Image]]] = {
    "PNG": PngImageFile,
    "JPEG": JpegImageFile,
    "GIF": GifImageFile,
    "WebP": WebPImageFile,
}
# First bytes -> format. Formats without a reader are listed so that a refusal can name them.
_MAGIC: Final = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"%PDF", "PDF"),
    (b"<svg", "SVG"),
    (b"<?xml", "SVG"),
    (b"\xff\x0a", "JPEG XL"),
)
_BRANDS: Final = {b"avif": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC"}

ARRAYS_BYTES_MAX: Final = 256 * 1024 * 1024
FACTS_MAX: Final = 1_024  # images whose facts are remembered; some 5 KB each

_PROBE_SIZE: Final = (224, 224)  # pixels; a size that every processor takes
_TEXT_ARRAYS: Final = ("input_ids", "attention_mask", "labels")
# Arrays with one value per token of the text; the values mark the tokens of images.
_TOKEN_ARRAYS: Final = frozenset(("token_type_ids", "mm_token_type_ids", "images_seq_mask"))
# The tiles of each image in DeepSeek-VL2. The encoder searches for a row of zeros after the last
# tile, and reads beyond the array if there is no such row.
_CROPS: Final = "images_spatial_crop"
_NUMBERS: Final = "biuf"  # NumPy kinds for the encoder; some processors also return texts
_WORD: Final = "alpha"  # a word that no template writes by itself

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Expansion:
    """The processor's output for one image: tokens, the text around the tokens, and arrays."""

    before: str
    ids: NDArray[np.int32]
    after: str
    arrays: Arrays


@dataclass(frozen=True, slots=True)
class _Facts:
    """The facts about an image that stay known after its arrays are evicted."""

    identity: bytes
    ids: NDArray[np.int32]
    grid: tuple[tuple[int, ...], ...]


class ImageReader:
    """Reads image files with the model's processor, and remembers the results.

    `before` and `after` are the text that the processor writes around every image.
    `counts` has an entry for every outcome: "decoded", "again" (the arrays were gone), "known", and
    the code of each refusal. The inference thread counts "again", the image thread all others.
    Owner: the image thread. Other threads call `forget`, and a PromptImage's `inputs`. If the
    arrays are gone, `inputs` waits for the image that is being decoded. The processor's tokenizer
    belongs to this reader alone, since each call changes the tokenizer's settings.
    Memory: ARRAYS_BYTES_MAX of arrays (only one image if that is larger) and FACTS_MAX facts. A
    PromptImage holds its file, and lives as long as its request. One image is decoded at a time;
    with the processor's copies, decoding takes at most 16 bytes per pixel, 640 MB at PIXELS_MAX.
    """

    def __init__(
        self,
        processor: Any,
        config: Mapping[str, Any],
        marker: str,
        pixels_max: int = PIXELS_MAX,
    ) -> None:
        """Probe the processor; `marker` is what the chat template writes for an image.

        Raises:
            StartError: the processor cannot read images.
        """
        from mlx_vlm import prepare_inputs  # takes seconds; not for text models

        self.counts: Counter[str] = Counter()
        self._prepare = prepare_inputs
        self._processor = processor
        self._image_token_id = config.get("image_token_index", config.get("image_token_id"))
        self._marker = marker
        self._pixels_max = pixels_max
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._added = frozenset(self._tokenizer.added_tokens_decoder)
        self._decoding = threading.Lock()  # held for seconds
        # Kept for one key: images, decoded, 256 MB
        self._facts: MemoryByOwner[str, _Facts] = MemoryByOwner(FACTS_MAX)
        self._arrays: MemoryByOwner[str, _Expansion]
        self._arrays = MemoryByOwner(ARRAYS_BYTES_MAX, _bytes_of)
        image = Image.new("RGB", _PROBE_SIZE)
        probe = self._probed(image)
        self._refuse_numbered(image, probe.ids.tolist())
        self.before, self.after = probe.before, probe.after

    def _probed(self, image: Image.Image) -> _Expansion:
        """Return the output for an image; if the processor refuses padding, stop passing padding.

        Raises:
            StartError: the processor cannot read the image.
        """
        try:
            try:
                return self._expanded(image)
            except Exception as error:
                if "'padding'" not in str(error):
                    raise
                self._processor.process = functools.partial(unpadded, self._processor)
                return self._expanded(image)
        except Exception as error:  # a processor is a program of the model
            raise StartError(f"The model's processor cannot read images: {error}") from error

    def read(self, digest: str, data: bytes, owner: str = "") -> PromptImage:
        """Return the image of the file `data`, which `digest` names.

        The results are remembered for `owner` alone. Otherwise the speed of an answer would reveal
        which images others have sent.

        Raises:
            RequestError: 400, as in `decoded`, or `image_refused` by the processor.
        """
        facts, outcome = self._facts.get(owner, digest), "known"
        if facts is None:
            try:
                expansion = self._read(data)
            except RequestError as error:
                self.counts[error.code] += 1
                raise
            arrays = expansion.arrays
            grid = arrays.get("image_grid_thw")
            grid_rows = () if grid is None else tuple(map(tuple, grid.reshape(-1, 3).tolist()))
            # The identity covers pixels and tokens, so that every setting counts. _TOKEN_ARRAYS
            # follow from the tokens.
            seen = {name: array for name, array in arrays.items() if name not in _TOKEN_ARRAYS}
            identity = identity_of({**seen, "ids": expansion.ids})
            facts, outcome = _Facts(identity, expansion.ids, grid_rows), "decoded"
            self._facts.put(owner, digest, facts)
            self._arrays.put(owner, digest, expansion)
        self.counts[outcome] += 1
        inputs = functools.partial(self._inputs, owner, digest, data)
        return PromptImage(facts.identity, tuple(facts.ids.tolist()), facts.grid, inputs, owner)

    def _inputs(self, owner: str, digest: str, data: bytes) -> Arrays:
        """Return the encoder's inputs, read-only. Any thread.

        Raises:
            RequestError: memory is too short to decode the image again.
        """
        expansion = self._arrays.get(owner, digest)
        if expansion is None:
            expansion = self._read(data)
            self.counts["again"] += 1
            self._arrays.put(owner, digest, expansion)
        return expansion.arrays

    def _read(self, data: bytes) -> _Expansion:
        """Decode and process one file, one at a time. Raises RequestError."""
        with self._decoding:
            image = decoded(data, self._pixels_max)
            try:
                expansion = self._expanded(image)
            except Exception as error:  # the probe passed, so the processor refuses this image
                raise _refused(image, str(error.__context__ or error)) from error
            if (expansion.before, expansion.after) != (self.before, self.after):
                raise _refused(image, "it would be cut into several")
            return expansion

    def _expanded(self, image: Image.Image) -> _Expansion:
        """Run the model's processor on one image. Raises whatever the processor raises."""
        ids, arrays = self._processed([image])
        # The tokenizer may put tokens around every text.
        first = int(bool(ids) and ids[0] == self._tokenizer.bos_token_id)
        last = len(ids) - int(len(ids) > first and ids[-1] == self._tokenizer.eos_token_id)
        added = [at for at in range(first, last) if ids[at] in self._added]
        if not added:
            raise ValueError(f"it writes no token for an image where {self._marker!r} stands")
        start, end = added[0], added[-1] + 1
        assert first <= start < end <= last, (first, start, end, last)
        for name in _TOKEN_ARRAYS & arrays.keys():
            arrays[name] = _array(arrays[name].reshape(1, -1)[:, start:end])
        if _CROPS in arrays:
            crops = arrays[_CROPS]  # (1, images, 2): rows of zeros end the list
            missing = max(0, arrays["pixel_values"].shape[1] - crops.shape[1])
            arrays[_CROPS] = _array(np.pad(crops, ((0, 0), (0, missing), (0, 0))))
        run = np.array(ids[start:end], dtype=np.int32)
        return _Expansion(self._text(ids[first:start]), run, self._text(ids[end:last]), arrays)

    def _processed(self, images: list[Image.Image]) -> tuple[list[int], dict[str, NDArray[Any]]]:
        """Return the token ids of the images' markers in a row, and the processor's arrays."""
        outputs = self._prepare(
            self._processor,
            images=images,
            prompts=self._marker * len(images),
            image_token_index=self._image_token_id,
        )
        arrays = {
            name: _array(value)
            for name, value in outputs.items()
            if value is not None and name not in _TEXT_ARRAYS
        }
        arrays = {name: array for name, array in arrays.items() if array.dtype.kind in _NUMBERS}
        return np.array(outputs["input_ids"]).reshape(-1).tolist(), arrays

    def _refuse_numbered(self, probe: Image.Image, run: Sequence[int]) -> None:
        """Raise if the processor writes a second image differently from a first image.

        An image is read without regard to the images before it.
        """
        try:
            ids, _ = self._processed([probe, probe])
        except Exception as error:  # the processor takes only one image, which suffices
            log.debug("a second image is refused by the processor: %s", error)
            return
        both, single = ("".join(f"<{token}>" for token in tokens) for tokens in (ids, run))
        if both.count(single) < 2:
            raise StartError(
                "The model's processor writes two images otherwise than each by itself (it numbers "
                "or gathers them), and here each is read by itself"
            )

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else ""
        return text

    # ------------------------------------------------------------ memory

    def forget(self) -> None:
        """Forget all images, except an image that is being read. Any thread."""
        self._facts.clear()
        self._arrays.clear()

    def outcomes(self) -> dict[str, int]:
        """Return how many files had each outcome. Any thread."""
        counts = self.counts.copy()
        taken = {outcome: counts.pop(outcome, 0) for outcome in ("decoded", "again", "known")}
        return taken | {"refused": counts.total()}


def unpadded(processor: Any, text: str, images: Sequence[Image.Image], **_: Any) -> Any:
    """Return a processor's output for a text and its images, without further arguments.

    mlx-vlm 0.7.10 calls a processor's `process`, if any, and passes `padding`, which is meant for
    the tokenizer. Llava's processor passes all arguments on to an image processor, which refuses
    `padding` in transformers 5.4 and newer (mlx-vlm's issue 870, fixed upstream for PaliGemma
    alone). One image and its marker are one text, which needs no padding.
    """
    return processor(text=text, images=images)


def _bytes_of(_digest: str, expansion: _Expansion) -> int:
    """Return the bytes of the arrays, but at most the limit, so that the newest image stays."""
    return min(max(1, sum(array.nbytes for array in expansion.arrays.values())), ARRAYS_BYTES_MAX)


def _array(value: Any) -> NDArray[Any]:
    """Return a read-only copy outside MLX's memory."""
    array = np.array(value)
    array.flags.writeable = False
    return array


def _refused(image: Image.Image, reason: str) -> RequestError:
    return RequestError(
        f"The image is {image.width:,} x {image.height:,} pixels, and the model's processor does "
        f"not take it: {reason}. Crop it, or add a margin.",
        code="image_refused",
    )


def image_marker(tokenizer: Any, processor: Any) -> str | None:
    """Return the text that the chat template writes for an image in a user's message.

    If the template shows no image, return the processor's own marker. Return None if that is
    unknown or the template numbers images; then the model takes no images.
    """
    text: dict[str, str] = {"type": "text", "text": _WORD}
    head, found, tail = _rendered(tokenizer, [text]).partition(_WORD)
    one_text, two_text = (
        _rendered(tokenizer, [{"type": "image"}] * count + [text]) for count in (1, 2)
    )
    end = _WORD + tail
    if (
        found
        and one_text.startswith(head)
        and one_text.endswith(end)
        and len(one_text) > len(head + end)
    ):
        marker = one_text[len(head) : len(one_text) - len(end)]
        return marker if two_text == head + marker * 2 + end else None
    token = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
    return str(token) if token else None


def _rendered(tokenizer: Any, content: list[dict[str, str]]) -> str:
    """Return the rendered text of a user's message; "" if the template refuses the message."""
    render: Callable[..., str] = tokenizer.apply_chat_template
    try:
        return render([{"role": "user", "content": content}], tokenize=False)
    except StartError:  # the template does not end
        raise
    except Exception as error:  # a template is a program and may raise any exception
        log.debug("image probe refused: %s", error)
        return ""


# ---------------------------------------------------------------- decoding


def decoded(data: bytes, pixels_max: int) -> Image.Image:
    """Return the upright RGB image of a file: PNG, JPEG, WebP, or a GIF's first frame.

    Transparent pixels become white, as on the pages that such images are made for. Often these
    pixels are stored as black, and black text on black cannot be read. Channels of 16 bits are cut
    to the upper 8 bits. Decoding takes 4 to 16 bytes per pixel besides the file; WebP takes most.

    Raises:
        RequestError: 400, with code `image_type`, `image_too_many_pixels` or `image_broken`.
    """
    assert pixels_max > 0, pixels_max
    kind = _kind_of(data)
    _refuse_segments(kind, data)
    try:
        image = _READERS[kind](io.BytesIO(data))
    except Image.DecompressionBombError:  # raised before decoding, without the size
        over = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise _too_many(f"over {over:,} pixels", pixels_max) from None
    except Exception as error:  # a damaged header may raise anything
        raise _broken(
            kind, data, f"its header is damaged, or it has no pixels ({_error_text(error)})"
        ) from error
    width, height = image.size
    if width * height > pixels_max:
        raise _too_many(f"{width:,} x {height:,} = {width * height:,} pixels", pixels_max)
    try:
        image.load()
        _turn_upright(image)
        return _rgb(image)
    except Exception as error:  # damaged data may raise anything
        raise _broken(kind, data, _error_text(error)) from error


def _kind_of(data: bytes) -> str:
    """Return the format by the file's first bytes. Raises RequestError for other formats."""
    kind = next((name for magic, name in _MAGIC if data.startswith(magic)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "WebP"
    elif data[4:8] == b"ftyp":
        kind = _BRANDS.get(data[8:12], "")
    if kind not in _READERS:
        named = kind or f"of no known format (it begins with {data[:8].hex(' ') or 'nothing'})"
        raise RequestError(
            f"The image is {named}; PNG, JPEG, WebP and GIF are read. Send it as one of these.",
            code="image_type",
        )
    return kind


def _refuse_segments(kind: str, data: bytes) -> None:
    """Raise for a JPEG that would take minutes.

    Each scan is a pass over the whole image, and each piece of metadata is a pass over all earlier
    metadata. Compressed data cannot contain the marker bytes of either.
    """
    for marker, name in ((b"\xff\xda", "scans"), (b"Exif\0\0", "pieces of metadata")):
        count = data.count(marker) if kind == "JPEG" else 0
        if count > SEGMENTS_MAX:
            raise _broken(kind, data, f"it has {count:,} {name}; at most {SEGMENTS_MAX} are read")


def _turn_upright(image: Image.Image) -> None:
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except Exception as error:  # damaged metadata may raise anything; the pixels are whole
        log.info("an image is shown as it is stored, its metadata: %s", type(error).__name__)


def _rgb(image: Image.Image) -> Image.Image:
    """Return a decoded image of any mode as RGB."""
    if image.mode == "I;16":
        image = _eight_bits(image)
    if image.has_transparency_data:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(rgba, mask=rgba)
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return a grey 16-bit image with 8 bits; Pillow's `convert` would clip light values."""
    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    if isinstance(clear := image.info.get("transparency"), int):
        grey[values == clear] = 255
    return Image.fromarray(grey)


def _too_many(measured: str, pixels_max: int) -> RequestError:
    return RequestError(
        f"The image has {measured} and this server accepts {pixels_max:,}. Send a smaller one.",
        code="image_too_many_pixels",
    )


def _broken(kind: str, data: bytes, reason: str) -> RequestError:
    return RequestError(
        f"The image, a {kind} file of {len(data):,} bytes, cannot be read: {reason}. It may have "
        "been cut off or damaged on its way; save it anew and send it again.",
        code="image_broken",
    )


def _error_text(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
