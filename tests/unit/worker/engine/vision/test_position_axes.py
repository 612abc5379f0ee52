"""A model gets positions of as many axes as it takes, however a prompt is cut."""

import functools
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest

from hearth.worker.cache.image_keys import ImageRun, PromptImage
from hearth.worker.engine.vision.image_encoding_and_positions import ImageEncoder
from hearth.worker.engine.vision.vlm_language_model import VLMLanguageModel
from scripts.fixtures.checkpoint_files import vision_model

Config = dict[str, Any]
LAYERS: Final = 2
ERROR_MAX: Final = 2e-4  # of logits up to 30, in float32
PICTURE, PICTURE_BEGIN, PICTURE_END = 5, 6, 7  # tokens
_TEXT: Final[Config] = dict(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    vocab_size=256,
    max_position_embeddings=4096,
)
_TOWER: Final[Config] = dict(
    depth=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=2,
    patch_size=14,
    out_hidden_size=64,
    num_position_embeddings=16,
    deepstack_visual_indexes=[0],
)


def _compass(**text: Any) -> Config:
    return dict(
        model_type="cohere_compass",
        text_config=dict(_TEXT, model_type="cohere_compass_text", **text),
        vision_config=_TOWER,
        image_token_id=PICTURE,
        vision_start_token_id=PICTURE_BEGIN,
    )


_SECTIONS: Final = {"mrope_section": [6, 5, 5], "rope_theta": 1e4}
# (axes of its positions, configuration)
TOWERS: Final[dict[str, tuple[int, Config]]] = {
    "cohere_compass": (1, _compass()),
    "cohere_compass with mRoPE": (3, _compass(rope_parameters={"full_attention": _SECTIONS})),
    "minimax_m3_vl": (
        1,
        dict(
            model_type="minimax_m3_vl",
            text_config=dict(
                _TEXT,
                model_type="minimax_m3",
                num_local_experts=4,
                num_experts_per_tok=2,
                dense_intermediate_size=64,
                shared_intermediate_size=64,
                rotary_dim=16,
            ),
            vision_config=dict(
                hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
            ),
        ),
    ),
}


def whole_and_language(name: str) -> tuple[Any, VLMLanguageModel]:
    from mlx_vlm.models.cache import make_prompt_cache

    whole = vision_model(TOWERS[name][1])
    text = whole.language_model
    return whole, VLMLanguageModel(text, functools.partial(make_prompt_cache, text))


def cut_logits(
    language: VLMLanguageModel, vision: ImageEncoder, ids: list[int], runs: Sequence[ImageRun]
) -> mx.array:
    """Return the logits of a prompt that is forwarded in four parts."""
    cache = language.make_cache()
    parts = [
        language(mx.array([ids[at:end]]), cache, **vision.model_arguments(ids[at:end], at, runs))
        for at, end in pairwise((0, 5, 12, len(ids) - 1, len(ids)))
    ]
    return mx.concatenate(parts, axis=1)


@pytest.mark.parametrize("name", TOWERS)
def test_text_has_the_positions_that_the_model_gives_it(name: str) -> None:
    whole, language = whole_and_language(name)
    assert language.position_axes == TOWERS[name][0]
    ids = [random.Random(0).randrange(20, 256) for _ in range(40)]
    expected = whole.language_model(mx.array([ids]), cache=language.make_cache()).logits
    got = cut_logits(language, ImageEncoder(whole, language, 0), ids, ())
    assert float(mx.abs(got - expected).max()) <= ERROR_MAX


@pytest.mark.parametrize("name", [name for name in TOWERS if "compass" in name])
def test_an_image_has_the_positions_that_the_model_gives_it(name: str) -> None:
    whole, language = whole_and_language(name)
    inputs = {
        "pixel_values": np.random.default_rng(0).normal(size=(16, 3 * 2 * 14 * 14)),
        "image_grid_thw": np.array([[1, 4, 4]]),  # four tokens, as 2 x 2 patches are one
    }
    arrays = {key: mx.array(array.astype(np.float32)) for key, array in inputs.items()}
    arrays["image_grid_thw"] = mx.array(inputs["image_grid_thw"])
    image_ids = (PICTURE_BEGIN, *[PICTURE] * 4, PICTURE_END)
    image = PromptImage(b"it", image_ids, ((1, 4, 4),), lambda: inputs)
    ids = [20, 21, 22, *image_ids, *range(30, 60)]
    expected = whole(mx.array([ids]), cache=language.make_cache(), **arrays).logits
    got = cut_logits(
        language, ImageEncoder(whole, language, 0), ids, [ImageRun(3, 3 + len(image_ids), image)]
    )
    assert float(mx.abs(got - expected).max()) <= ERROR_MAX
