"""Leaves out the caches of projected K and V that mlx-vlm's GLM-5.3-Flash (`glm5_next`) fills.

Its attention keeps a latent of each token, from which the K and V of all heads follow. For a prompt
of up to 32,768 tokens upstream keeps these too: with the published numbers 64 KB a token and layer,
where the latent takes 1 KB. A forward that finds no such cache projects the latents again, which is
a small part of its attention. The answers then do not depend on whether the cache was there.

Owner: the inference thread.
"""

from typing import Any, Final

MODULE: Final = "mlx_vlm.models.glm5_next.language"  # of the language model's class


class NoProjections:
    """Stands where upstream keeps projected K and V, and holds nothing."""

    state: tuple[()] = ()
    nbytes = 0

    def size(self) -> int:
        """Return a number that is never that of the tokens read, so that upstream adds nothing."""
        return -1

    def empty(self) -> bool:
        return True

    @classmethod
    def merge(cls, caches: list[Any], prefix_lens: Any = None) -> "NoProjections":
        return cls()

    def extract(self, idx: int) -> "NoProjections":
        return self

    def filter(self, batch_indices: Any) -> None:
        """Hold nothing for these rows either."""

    def extend(self, other: Any) -> None:
        """Hold nothing for these rows either."""


def leave_out_projections(network: Any) -> None:
    """Have a language model of `glm5_next` make caches without projections; others stay."""
    if type(network).__module__ != MODULE:
        return
    make_cache = network.make_cache

    def make_without() -> list[Any]:
        caches: list[Any] = make_cache()
        for layer in caches:
            if hasattr(layer, "caches"):  # the last part is that of the projections
                layer.caches = (*layer.caches[:-1], NoProjections())
        return caches

    network.make_cache = make_without
