"""Calls a model's processor without the padding that mlx-vlm asks of every one.

mlx-vlm 0.7.10 calls each processor with `padding`, which is meant for its tokenizer. Its processor
of Llava hands all that it is given on to its image processor, and transformers 5.4 and newer refuse
`padding` there (mlx-vlm's issue 870, mended upstream for PaliGemma alone). One image and its marker
are one text: there is nothing to pad.
"""

from collections.abc import Sequence
from typing import Any

from PIL import Image


class UnpaddedProcessor:
    """Stands for a processor where mlx-vlm's `prepare_inputs` takes one.

    That calls `process` where there is such a method, and the processor itself otherwise. All else
    is the processor's own.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def process(self, text: str, images: Sequence[Image.Image], **_: Any) -> Any:
        """Return what the processor makes of a text and its images, and of nothing else."""
        return self._processor(text=text, images=images)
