"""Checks that conversations with images give the same tokens and answers as mlx-vlm."""

import hashlib
import io
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.settings import load_settings
from hearth.worker.prompt.prompt_with_sampled_turns import BuiltPrompt, PromptContent
from hearth.worker.prompt.template_turn_tokens import end_of_turn_ids, turn_marks
from hearth.worker.setup.load_setup import make_vision
from hearth.worker.setup.prompt_and_session_setup import make_builder
from scripts.fixtures.fixture_cache import VISION_NAMES, fixture_dir
from scripts.harness.image_files import painted
from scripts.harness.socketless_worker import loaded
from scripts.harness.vision_worker import LookingMachine
from tests.helpers.by_day import by_day

TOKENS_MAX = 12
SIZES = ((224, 160), (90, 120))
SYSTEM = {"role": "system", "content": "You look at pictures."}


def file_of(number: int, size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    painted(number, size).save(file, "PNG")
    return file.getvalue()


def asked(*parts: str | int) -> list[dict[str, Any]]:
    """Return a question of words, and of images by their place among those sent."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": str(part)}
        for part in parts
    ]
    return [SYSTEM, {"role": "user", "content": content}]


def built(name: str, messages: list[dict[str, Any]], files: list[bytes]) -> BuiltPrompt:
    """Return the prompt as a worker makes it."""
    model, settings = loaded(name), load_settings({"DEFAULT_THINKING": "false"}, None)
    vision = make_vision(model, settings)
    assert vision is not None and vision.encoder.splits_images
    pictures = {
        str(at): vision.reader.read(hashlib.sha256(data).hexdigest(), data)
        for at, data in enumerate(files)
    }
    marks = turn_marks(model.tokenizer)
    ends = end_of_turn_ids(model.tokenizer, model.generation_config)
    builder = make_builder(model.tokenizer, marks, ends, 100_000, settings, vision.form)
    return builder.build(PromptContent(messages, [], images=pictures))


@pytest.mark.parametrize("name", by_day(VISION_NAMES, ("qwen3_5_vl",)))
@pytest.mark.parametrize(
    "parts",
    [(0, "What is this?"), ("Look:", 0, "\nand at this:\n", 1, "Compare them."), (0, 1, "Both?")],
)
def test_the_prompt_and_its_answer_are_mlx_vlms(
    name: str, parts: tuple[str | int, ...], tmp_path: Path
) -> None:
    import mlx_vlm

    files = [file_of(at, SIZES[at]) for at in range(sum(isinstance(p, int) for p in parts))]
    images = []
    for at, data in enumerate(files):
        images.append(str(tmp_path / f"{at}.png"))
        Path(images[-1]).write_bytes(data)
    one = built(name, asked(*parts), files)
    model, processor = mlx_vlm.load(str(fixture_dir(name)))
    text = processor.tokenizer.apply_chat_template(
        asked(*parts), add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    theirs = mlx_vlm.prepare_inputs(processor, images=images, prompts=text)
    assert one.ids == theirs["input_ids"].flatten().tolist()
    answer = mlx_vlm.stream_generate(
        model, processor, text, image=images, max_tokens=TOKENS_MAX, temperature=0.0
    )
    expected = [response.token for response in answer][:TOKENS_MAX]
    ours = LookingMachine(name)
    said = super(LookingMachine, ours).submit(one.ids, TOKENS_MAX, one.images)
    ours.run()
    assert ours.settled(said).tokens == expected
