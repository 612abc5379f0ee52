"""Gemma 4, of which there is no fixture: rows of every layer, and attention both ways."""

import functools
import logging
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from hearth.worker.cache.image_keys import PromptImage, identity_of
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.vision.image_encoding_and_positions import ImageEncoder
from hearth.worker.engine.vision.vision_self_test import checked_vision
from hearth.worker.engine.vision.vlm_language_model import VLMLanguageModel
from hearth.worker.engine.vision.vlm_loader import VisionModel
from scripts.harness.socketless_worker import loaded
from scripts.harness.vision_worker import prompt
from tests.helpers.models.vision_engine import text

IMAGE, BEGIN, END = 3069, 3067, 3068
VOCABULARY = 3072


def gemma4(layer_inputs: int, attention: str | None) -> LoadedModel:
    """Return a small one of random weights, with the tokenizer of a fixture."""
    from mlx_vlm.models import gemma4 as module
    from mlx_vlm.models.cache import make_prompt_cache

    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32, global_head_dim=32)
    words = dict(vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY)
    language = module.TextConfig(
        **(heads | words),
        **dict(hidden_size=128, num_hidden_layers=4, intermediate_size=256, sliding_window=64),
        **dict(num_kv_shared_layers=0, sliding_window_pattern=2),
        hidden_size_per_layer_input=layer_inputs,
        use_bidirectional_attention=attention,
    )
    tower = module.VisionConfig(
        **(heads | dict(num_key_value_heads=4)),
        **dict(hidden_size=128, num_hidden_layers=2, intermediate_size=128),
        position_embedding_size=64,
    )
    config = module.ModelConfig(
        text_config=language,
        vision_config=tower,
        **dict(image_token_id=IMAGE, audio_token_id=3070, vocab_size=VOCABULARY, hidden_size=128),
    )
    mx.random.seed(1)
    model = module.Model(config)
    model.update(
        tree_map(
            lambda weight: mx.random.normal(weight.shape) * 0.08 if weight.ndim > 1 else weight,
            model.parameters(),
        )
    )
    mx.eval(model.parameters())
    spoken = model.language_model
    adapter = VLMLanguageModel(spoken, functools.partial(make_prompt_cache, spoken))
    vision = VisionModel(model, adapter, None)
    return replace(loaded("qwen3_vl"), model=adapter, vision=vision)


def shown() -> PromptImage:
    """Return an image of 96 x 96 pixels, which is four tokens."""
    pixels = np.random.default_rng(0).random((1, 3, 96, 96), dtype=np.float32)
    types = np.array([[0, 1, 1, 1, 1, 0]])
    inputs: dict[str, Any] = {"pixel_values": pixels, "mm_token_type_ids": types}
    ids = (BEGIN, *[IMAGE] * 4, END)
    return PromptImage(identity_of(inputs), ids, (), lambda: inputs)


@pytest.mark.parametrize("layer_inputs", [0, 16])
def test_images_are_offered_where_each_layer_is_given_rows_of_its_own(layer_inputs: int) -> None:
    model = gemma4(layer_inputs, None)
    vision = checked_vision(model, shown(), 1)
    assert vision is not None and vision.splits_images
    ids, runs = prompt(text(1, 3), shown(), text(2, 3))
    told = vision.model_arguments(ids[:5], 0, runs)
    assert ("per_layer_inputs" in told) == bool(layer_inputs)
    assert "position_ids" not in told and vision.shift(runs, len(ids)) == 0


def test_images_are_refused_where_their_tokens_see_what_follows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """mlx-vlm lets them only where a prompt begins with them in one forward."""
    with caplog.at_level(logging.WARNING, "hearth.worker"):
        assert checked_vision(gemma4(0, "vision"), shown(), 1) is None
    assert "images are refused" in caplog.text and "in one forward alone" in caplog.text


def test_layer_inputs_that_are_left_out_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ImageEncoder.model_arguments

    def without(self: ImageEncoder, *given: Any) -> dict[str, Any]:
        told = right(self, *given)
        told.pop("per_layer_inputs", None)
        return told

    monkeypatch.setattr(ImageEncoder, "model_arguments", without)
    assert checked_vision(gemma4(16, None), shown(), 1) is None
