"""The fixtures are what the other tests believe them to be."""

from pathlib import Path

import mlx_lm
import pytest
from PIL import Image

from scripts.fixtures.fixture_cache import (
    TEXT_NAMES,
    TINY_VISION_NAMES,
    VISION_NAMES,
    fixture_dir,
)

pytestmark = pytest.mark.night  # a test that uses a fixture fails where it is of no use
PROMPT = "def parse(self, text):\n    return"


def greedy(directory: Path, prompt: str, token_count: int = 12) -> list[int]:
    model, tokenizer = mlx_lm.load(str(directory))
    answer = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=token_count)
    return [response.token for response in answer]


@pytest.mark.parametrize("name", TEXT_NAMES)
def test_text_fixture_generates_and_depends_on_the_prompt(name: str) -> None:
    directory = fixture_dir(name)
    tokens = greedy(directory, PROMPT)
    assert len(set(tokens)) > 4, "the output is a loop"
    assert tokens != greedy(directory, "x" + PROMPT)


@pytest.mark.parametrize(
    ("name", "tiny"),
    [*((name, False) for name in VISION_NAMES), *((name, True) for name in TINY_VISION_NAMES)],
)
def test_vision_fixture_sees_the_image(name: str, tiny: bool) -> None:
    import mlx_vlm

    model, processor = mlx_vlm.load(str(fixture_dir(name, tiny=tiny)))
    question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    prompt = processor.tokenizer.apply_chat_template(
        question, tokenize=False, add_generation_prompt=True
    )
    answers = set()
    for shade in (0, 90, 200):
        image = Image.new("RGB", (112, 112), (shade, 255 - shade, shade // 2))
        answer = mlx_vlm.generate(model, processor, prompt, image=[image], max_tokens=8)
        answers.add(answer.text)
    assert len(answers) > 1
