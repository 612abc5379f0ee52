"""builtin:pocket: its files can be relied on. What it can do is in tests/e2e/pocket."""

import random
import re
from typing import Any

import mlx_lm
import pytest
from hypothesis import example, given, strategies as st
from mlx_lm.utils import get_total_parameters
from tokenizers import Tokenizer

from hearth.worker.engine.model_loader import POCKET_DIR
from scripts.fixtures.checkpoint_files import added_token_ids
from scripts.pocket import conversation_tokens
from scripts.pocket.conversations import talk

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {}}}]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any, dict[str, Any]]:
    return mlx_lm.load(str(POCKET_DIR), return_config=True)


@pytest.fixture(scope="module")
def tokenizer(loaded: tuple[Any, Any, dict[str, Any]]) -> Any:
    return loaded[1]


def render(tokenizer: Any, messages: list[dict[str, Any]], **variables: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **variables)


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "read", "arguments": arguments}}


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
    assert '\n{"description": "", "name": "read", "parameters": {}}\n' in head
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


def test_end_tokens_are_those_of_qwen(loaded: tuple[Any, Any, dict[str, Any]]) -> None:
    ids = added_token_ids(POCKET_DIR / "tokenizer.json")
    assert loaded[1].eos_token_ids == {ids["<|im_end|>"], ids["<|endoftext|>"]}


def test_added_tokens_are_one_token_each(tokenizer: Any) -> None:
    for token, token_id in added_token_ids(POCKET_DIR / "tokenizer.json").items():
        assert tokenizer.encode(token, add_special_tokens=False) == [token_id]


@example(text=" a <|im_end|> b\n<think> \0")
@given(text=st.lists(st.text() | st.sampled_from(conversation_tokens.ADDED)).map("".join))
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_it_is_small_and_says_what_it_is(loaded: tuple[Any, Any, dict[str, Any]]) -> None:
    """It has at most 5.8 M parameters and 12 MB in the repository."""
    model, tokenizer, config = loaded
    assert get_total_parameters(model) <= 5_800_000
    assert sum(file.stat().st_size for file in POCKET_DIR.iterdir()) <= 12_000_000
    assert config["model_type"] == "qwen3"
    assert config["vocab_size"] == len(tokenizer.get_vocab()) == conversation_tokens.VOCAB_SIZE


@pytest.mark.parametrize("seed", range(60))
def test_what_is_trained_on_is_what_the_template_renders(tokenizer: Any, seed: int) -> None:
    """Each beginning of a training text that an answer follows is a prompt of the template."""
    rng = random.Random(seed)
    made = talk(rng, 4, rng.choice((0, 6)), rng.choice((0, 3)))
    pieces = conversation_tokens.script(rng, made)
    messages, tools = conversation_tokens.messages_of(made)
    last = len(made.turns) - 1
    assert made.turns[last].role == "assistant"
    thinks = pieces[-2][0].startswith("<think>")
    text = "".join(text for text, _ in pieces[:-2])
    rendered = render(
        tokenizer,
        messages[:last],
        tools=tools or None,
        add_generation_prompt=True,
        enable_thinking=thinks,
    )
    assert without_thinking(text) == without_thinking(rendered)


def without_thinking(text: str) -> str:
    """Leave out what a turn may keep or lose: old thinking, and the block that closes it."""
    return re.sub(r"<think>.*?</think>\n\n", "", text, flags=re.DOTALL)


def test_the_learned_part_is_what_the_model_writes() -> None:
    rng = random.Random(5)
    made = talk(rng, 6, 0, 2)
    tokenizer = Tokenizer.from_file(str(POCKET_DIR / "tokenizer.json"))
    ids, learned = conversation_tokens.encoded(tokenizer, conversation_tokens.script(rng, made))
    ends = [
        at
        for at, token in enumerate(ids)
        if token == tokenizer.token_to_id(conversation_tokens.END)
    ]
    answered = [at for at in ends if learned[at]]
    assert len(answered) == sum(turn.role == "assistant" for turn in made.turns)
    assert not any(learned[at + 1] for at in answered), "the line's end is the template's"
