"""Makes the keys of a prompt: its token ids, with each image's tokens named by what it shows.

The token ids of all images are the same, so ids alone cannot be compared. The cache hashes and
compares keys: token ids, and for an image's tokens negative numbers made from its content. Another
image is another prompt, from the image's first token on.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from hearth.worker.cache.block_hash import Tokens

IDENTITY_BYTES: Final = 16

ImageName = tuple[str, bytes]  # of a picture: its owner and its identity

_SIGN: Final = 0x8000_0000
_INSIDE: Final = 0x4000_0000  # set in each key of an image but its first
_FIRST_MAX: Final = -(1 << 30) - 1  # the highest key that begins an image


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image as the model's processor made it. Its arrays are not kept here: they are large."""

    identity: bytes  # of all that the encoder is given: pixels, sizes
    ids: tuple[int, ...]  # the tokens that stand for it in a prompt, those around it included
    grid: tuple[tuple[int, ...], ...]  # its patches (time, height, width); () where unknown
    inputs: Callable[[], Mapping[str, NDArray[Any]]]  # what the encoder is given. Any thread.
    owner: str = ""  # the only one it is kept for, once it is encoded; "" = everybody

    @property
    def name(self) -> ImageName:
        """What its encoded rows are kept by."""
        return self.owner, self.identity

    def bare(self) -> "PromptImage":
        """Return what is known of it without its file, which `inputs` holds."""
        return replace(self, inputs=_given_up)


PromptImages = Mapping[str, PromptImage]  # by the digest of the file as it came


@dataclass(frozen=True, slots=True)
class ImageRun:
    """A picture and its place in a prompt: the tokens [start, end)."""

    start: int
    end: int
    picture: PromptImage

    def bare(self) -> "ImageRun":
        return replace(self, picture=self.picture.bare())


def _given_up() -> NoReturn:
    raise AssertionError("a bare picture has no file to encode")


def identity_of(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return what names an image by what the encoder is given of it."""
    digest = hashlib.blake2b(digest_size=IDENTITY_BYTES)
    for name, array in sorted(arrays.items()):
        head = f"{name} {array.dtype.str} {array.shape} ".encode()
        digest.update(len(head).to_bytes(8, "little") + head)
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def keys_of(ids: Sequence[int], runs: Iterable[ImageRun]) -> Tokens:
    """Return a prompt's keys: its ids, with what each image shows in place of its tokens."""
    keys = np.array(ids, dtype=np.int32)
    for run in runs:
        assert 0 <= run.start < run.end <= len(keys), (run.start, run.end, len(keys))
        octets = hashlib.shake_128(run.picture.identity).digest(4 * (run.end - run.start))
        values = np.frombuffer(octets, dtype="<u4") | (_SIGN | _INSIDE)
        values[0] &= ~np.uint32(_INSIDE)
        keys[run.start : run.end] = values.astype(np.uint32).view(np.int32)
    return keys


def ids_of(keys: Tokens, runs: Iterable[ImageRun]) -> Tokens:
    """Return the ids of which `keys` are the keys, `runs` being their images, or some more."""
    ids = keys.copy()
    for run in runs:
        ids[run.start : run.end] = run.picture.ids[: max(0, len(ids) - run.start)]
    return ids


def has_images(keys: Tokens) -> bool:
    return bool((keys < 0).any())


def image_count(keys: Tokens) -> int:
    """Return how many images begin in `keys`."""
    return int(np.count_nonzero(keys <= _FIRST_MAX))


def is_inside(keys: Tokens, position: int) -> bool:
    """Whether the tokens before and behind `position` are of one image."""
    return position < len(keys) and _FIRST_MAX < int(keys[position]) < 0


def image_borders(keys: Tokens) -> tuple[list[int], list[int]]:
    """Return where images begin, and where what is no image follows one, both ascending."""
    starts = np.flatnonzero(keys <= _FIRST_MAX)
    is_image = keys < 0
    ends = np.flatnonzero(is_image[:-1] & ~is_image[1:]) + 1
    return starts.tolist(), ends.tolist()


def ends_inside(images: Sequence[ImageRun], position: int) -> bool:
    """Whether a prefill that broke off at `position` left an image half read."""
    return any(run.start < position < run.end for run in images)
