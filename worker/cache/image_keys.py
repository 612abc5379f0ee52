"""Makes the keys of a prompt, which the cache hashes and compares.

The keys are the token ids of text, and negative numbers made from an image's content in place of
the image's tokens: the token ids of all images are the same. The keys of two prompts with different
images thus differ from the image's first token on.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from hearth.worker.cache.block_hash import Tokens

IDENTITY_BYTES: Final = 16

ImageName = tuple[str, bytes]  # (owner, identity) of an image

_SIGN: Final = 0x8000_0000
_INSIDE: Final = 0x4000_0000  # bit that is set in all keys of an image except the first
_FIRST_MAX: Final = -(1 << 30) - 1  # the highest key that begins an image


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image as the model's processor made it, without the arrays, which are large."""

    identity: bytes  # hash of the encoder's whole input: pixels, sizes
    ids: tuple[int, ...]  # the image's tokens in a prompt, with the marker tokens around them
    grid: tuple[tuple[int, ...], ...]  # numbers of patches (time, height, width); () = unknown
    inputs: Callable[[], Mapping[str, NDArray[Any]]]  # makes the encoder's input; for any thread
    owner: str = ""  # digest of the API key whose prompts share the encoded rows; "" = all keys

    @property
    def name(self) -> ImageName:
        """The name under which the image's encoded rows are kept."""
        return self.owner, self.identity

    def bare(self) -> "PromptImage":
        """Return the image without its file, which `inputs` holds."""
        return replace(self, inputs=_no_inputs)


PromptImages = Mapping[str, PromptImage]  # by the digest of the received file


@dataclass(frozen=True, slots=True)
class ImageRun:
    """An image and its position in a prompt: the tokens [start, end)."""

    start: int
    end: int
    image: PromptImage

    def bare(self) -> "ImageRun":
        return replace(self, image=self.image.bare())


def _no_inputs() -> NoReturn:
    raise AssertionError("a bare picture has no file to encode")


def identity_of(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the hash of the encoder's input, which identifies an image."""
    digest = hashlib.blake2b(digest_size=IDENTITY_BYTES)
    for name, array in sorted(arrays.items()):
        head = f"{name} {array.dtype.str} {array.shape} ".encode()
        digest.update(len(head).to_bytes(8, "little") + head)
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def keys_of(ids: Sequence[int], runs: Iterable[ImageRun]) -> Tokens:
    """Return a prompt's keys: its ids, with a hash of each image in place of its tokens."""
    keys = np.array(ids, dtype=np.int32)
    for run in runs:
        assert 0 <= run.start < run.end <= len(keys), (run.start, run.end, len(keys))
        octets = hashlib.shake_128(run.image.identity).digest(4 * (run.end - run.start))
        values = np.frombuffer(octets, dtype="<u4") | (_SIGN | _INSIDE)
        values[0] &= ~np.uint32(_INSIDE)
        keys[run.start : run.end] = values.astype(np.uint32).view(np.int32)
    return keys


def ids_of(keys: Tokens, runs: Iterable[ImageRun]) -> Tokens:
    """Return the token ids of `keys`. `runs` are all images in `keys`, and maybe later images."""
    ids = keys.copy()
    for run in runs:
        ids[run.start : run.end] = run.image.ids[: max(0, len(ids) - run.start)]
    return ids


def has_images(keys: Tokens) -> bool:
    return bool((keys < 0).any())


def image_count(keys: Tokens) -> int:
    """Return how many images begin in `keys`."""
    return int(np.count_nonzero(keys <= _FIRST_MAX))


def is_inside(keys: Tokens, position: int) -> bool:
    """Whether the tokens before and at `position` belong to the same image."""
    return position < len(keys) and _FIRST_MAX < int(keys[position]) < 0


def image_borders(keys: Tokens) -> tuple[list[int], list[int]]:
    """Return the positions where images begin, and those where text follows an image, ascending."""
    starts = np.flatnonzero(keys <= _FIRST_MAX)
    is_image = keys < 0
    ends = np.flatnonzero(is_image[:-1] & ~is_image[1:]) + 1
    return starts.tolist(), ends.tolist()


def ends_inside(images: Sequence[ImageRun], position: int) -> bool:
    """Whether a prefill that stopped at `position` has read only a part of an image."""
    return any(run.start < position < run.end for run in images)
