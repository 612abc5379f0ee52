"""A model that sees images has adapters in its language model: warm is cold with images too."""

import random
import tempfile
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from hearth.shared.errors import StartError
from hearth.worker.engine.model_loader import LoadedModel
from scripts.harness.lora_files import MLX_LM_WEIGHTS, with_adapters, write_adapter
from scripts.harness.socketless_worker import loaded
from scripts.harness.vision_worker import LookingMachine
from scripts.harness.warm.token_margins import same_bits, same_tokens
from scripts.harness.warm.warm_talks import TOKENS_MAX
from tests.helpers.by_day import by_day
from tests.helpers.worker.vision_talks import LookingTalk

NAMES = ("qwen3_vl", "gemma3")


@cache
def seeing(name: str) -> LoadedModel:
    directory = Path(tempfile.mkdtemp(prefix="lora-"))
    model = loaded(name)
    one, two = (write_adapter(directory / f"{n}", model, n) for n in (1, 2))
    return with_adapters(model, one=one, two=two)


@pytest.mark.parametrize("name", by_day(NAMES, ("gemma3",)))
@pytest.mark.parametrize("is_exact", [True, False])
def test_images_and_adapters_that_switch_between_turns_say_what_a_cold_one_says(
    name: str, is_exact: bool
) -> None:
    warm = LookingMachine(name, model=seeing(name), is_exact=is_exact)
    cold = LookingMachine(name, model=seeing(name), keeps=False, is_exact=is_exact)
    talk = LookingTalk(name, warm, cold)
    chance = random.Random(4)
    ids, cached = talk.opening(chance), []
    for adapter in ("", "one", "", "two", "one"):
        mine = warm.ask(ids, TOKENS_MAX, adapter=adapter)
        theirs = cold.ask(ids, TOKENS_MAX, adapter=adapter)
        (same_bits if is_exact else same_tokens)(mine, theirs)
        cached.append(mine.cached > 0)
        ids = talk.turn(chance, ids, theirs.tokens)
    assert cached == [False, False, True, False, True]
    assert warm.encoder_calls, "images were looked at"


def test_an_adapter_reaches_the_prompt_that_shows_an_image() -> None:
    machine = LookingMachine("qwen3_vl", model=seeing("qwen3_vl"), keeps=False)
    ids = LookingTalk("qwen3_vl", machine, machine).opening(random.Random(4))
    first = [machine.ask(ids, 1, adapter=adapter).logits[0] for adapter in ("", "one", "two")]
    assert not np.array_equal(first[0], first[1]) and not np.array_equal(first[1], first[2])


def test_an_adapter_of_what_makes_images_is_refused(tmp_path: Path) -> None:
    model = loaded("qwen3_vl")
    mine = write_adapter(tmp_path / "mine", model, 1)
    for extra, said in (
        ("vision_tower.blocks.0.attn.qkv", "the model has no vision_tower"),
        ("model.embed_tokens", "only blocks"),
    ):
        weights: dict[str, mx.array] = mx.load(str(mine / MLX_LM_WEIGHTS))  # type: ignore[assignment]
        mx.eval(weights)
        kept = {name: each for name, each in weights.items() if "layers." in name}
        kept |= {f"{extra}.lora_a": mx.zeros((8, 4)), f"{extra}.lora_b": mx.zeros((4, 8))}
        mx.save_safetensors(str(mine / MLX_LM_WEIGHTS), kept)
        with pytest.raises(StartError, match=said):
            with_adapters(model, mine=mine)
