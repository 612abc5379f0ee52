"""The fixtures are what the other tests believe them to be."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx_lm
import pytest
from PIL import Image

from scripts.fixtures.fixture_cache import (
    TEXT_NAMES,
    TINY_NAMES,
    TINY_VISION_NAMES,
    VISION_NAMES,
    fixture_dir,
)

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


@pytest.mark.parametrize("name", TINY_NAMES)
def test_tiny_fixture_has_two_layers_and_generates(name: str) -> None:
    directory = fixture_dir(name, tiny=True)
    assert json.loads((directory / "config.json").read_text())["num_hidden_layers"] == 2
    assert greedy(directory, PROMPT)


def test_quantised_fixture_generates() -> None:
    directory = fixture_dir("qwen3", dtype="bfloat16", quant=4)
    assert json.loads((directory / "config.json").read_text())["quantization"]["bits"] == 4
    assert greedy(directory, PROMPT, 3)


def test_template_of_a_fixture_renders_tools_and_opens_thinking() -> None:
    _, tokenizer = mlx_lm.load(str(fixture_dir("qwen3")), lazy=True)
    assert tokenizer.has_thinking and tokenizer.has_tool_calling
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    text = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "r"},
        ],
        tools=[{"type": "function", "function": {"name": "f"}}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=True,
    )
    assert '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\nr\n</tool_response>" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n")


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


def test_first_callers_at_once_get_the_same_fixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.fixtures.fixture_cache.cache_dir", lambda: tmp_path / "cache")
    with ThreadPoolExecutor() as pool:
        made = set(pool.map(lambda _: fixture_dir("qwen3", tiny=True), range(3)))
    assert made == {tmp_path / "cache" / "qwen3-tiny-fp32"}
    assert {"lock", "_tokenizer", "gpt_oss-tiny-fp32"} <= set(os.listdir(tmp_path / "cache"))
