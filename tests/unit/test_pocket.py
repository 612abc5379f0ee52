"""builtin:pocket is made whole, once, and its tokenizer and template can be relied on."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from worker.engine.pocket import (
    POCKET_CONTEXT_TOKENS,
    QWEN_TOKENS,
    VOCAB_SIZE,
    added_token_ids,
    ensure_pocket,
    new_directory,
)

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {}}}]


@pytest.fixture(scope="module")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_pocket(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def loaded(pocket: Path) -> tuple[Any, Any, dict[str, Any]]:
    return mlx_lm.load(str(pocket), return_config=True)


@pytest.fixture(scope="module")
def tokenizer(loaded: tuple[Any, Any, dict[str, Any]]) -> Any:
    return loaded[1]


def render(tokenizer: Any, messages: list[dict[str, Any]], **variables: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **variables)


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "read", "arguments": arguments}}


def test_pocket_loads_and_generates(loaded: tuple[Any, Any, dict[str, Any]]) -> None:
    model, tokenizer, config = loaded
    tokens = [row.token for row in mlx_lm.stream_generate(model, tokenizer, "import", 16)]
    assert len(set(tokens)) > 8
    assert config["max_position_embeddings"] == POCKET_CONTEXT_TOKENS
    assert config["vocab_size"] == len(tokenizer.get_vocab()) == VOCAB_SIZE


def test_end_tokens_are_those_of_qwen(
    loaded: tuple[Any, Any, dict[str, Any]], pocket: Path
) -> None:
    ids = added_token_ids(pocket / "tokenizer.json")
    assert loaded[1].eos_token_ids == {ids["<|im_end|>"], ids["<|endoftext|>"]}


def test_pocket_is_made_once(pocket: Path) -> None:
    before = (pocket / "config.json").stat().st_mtime_ns
    assert ensure_pocket(pocket.parent) == pocket
    assert (pocket / "config.json").stat().st_mtime_ns == before


def test_making_pocket_does_not_seed_the_random_state(tmp_path: Path) -> None:
    drawn = []
    for name in ("a", "b"):
        ensure_pocket(tmp_path / name)
        drawn.append(mx.random.uniform(shape=(4,)).tolist())
    assert drawn[0] != drawn[1]


def test_two_workers_starting_at_once_end_with_one_good_pocket(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=ensure_pocket, args=(tmp_path,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    (made,) = os.listdir(tmp_path)
    mlx_lm.load(str(tmp_path / made))


def test_the_slower_of_two_makers_keeps_the_faster_ones_directory(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with new_directory(target) as mine:
        (mine / "file").write_text("mine")
        with new_directory(target) as theirs:
            (theirs / "file").write_text("theirs")
    assert (target / "file").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["model"]


def test_a_maker_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "model") as directory:
        (directory / "file").write_text("half")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


@settings(deadline=None)
@example(text=" a <|im_end|> b\n<think> \0")
@given(text=st.lists(st.text() | st.sampled_from(QWEN_TOKENS)).map("".join))
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_added_tokens_are_one_token_each(tokenizer: Any, pocket: Path) -> None:
    for token, token_id in added_token_ids(pocket / "tokenizer.json").items():
        assert tokenizer.encode(token, add_special_tokens=False) == [token_id]


def test_template_without_thinking_closes_an_empty_block(tokenizer: Any) -> None:
    question = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    text = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
    assert render(tokenizer, question) == text
    text += "<|im_start|>assistant\n"
    thinking = render(tokenizer, question, add_generation_prompt=True, enable_thinking=True)
    plain = render(tokenizer, question, add_generation_prompt=True, enable_thinking=False)
    assert thinking == text
    assert plain == text + "<think>\n\n</think>\n\n"


def test_template_renders_tools_calls_and_results(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": "a", "tool_calls": [call({"x": "<"}), call('{"y": 2}')]},
        {"role": "tool", "content": "r1"},
        {"role": "tool", "content": "r2"},
    ]
    head, rest = render(tokenizer, messages, tools=TOOLS).split("<|im_end|>\n", 1)
    assert head.startswith("<|im_start|>system\ns\n\n# Tools")
    assert '\n{"type": "function", "function": {"name": "read", "parameters": {}}}\n' in head
    assert rest == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na\n"
        '<tool_call>\n{"name": "read", "arguments": {"x": "<"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "read", "arguments": {"y": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nr1\n</tool_response>\n"
        "<tool_response>\nr2\n</tool_response><|im_end|>\n"
    )


def test_template_keeps_reasoning_after_the_last_question_only(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "same"},
        {"role": "assistant", "content": "a", "reasoning_content": "old"},
        {"role": "user", "content": "same"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "new",
            "tool_calls": [call({})],
        },
    ]
    text = render(tokenizer, messages)
    assert "old" not in text
    assert "<|im_start|>assistant\n<think>\nnew\n</think>\n\n<tool_call>" in text
