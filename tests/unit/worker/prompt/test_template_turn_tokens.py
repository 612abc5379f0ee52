"""Checks what is learned from the families' chat templates, and which prompts are refused."""

from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load as load_from_disk

from hearth.shared.errors import PromptTooLong, RequestError
from hearth.shared.wire_messages import Prompt
from hearth.worker.prompt.prompt_with_sampled_turns import PromptBuilder, PromptContent
from hearth.worker.prompt.render_messages import Renderer
from hearth.worker.prompt.template_turn_tokens import end_of_turn_ids, turn_marks
from scripts.fixtures.fixture_cache import TEXT_NAMES, fixture_dir
from scripts.harness.model_families import bare_tokenizer
from tests.helpers.families.family_cases import written_family
from tests.helpers.worker.chat_templates import (
    CHATML,
    GEMMA,
    GLM,
    HARMONY,
    LLAMA,
    MISTRAL,
    PHI,
    PLAIN,
    SPECIALS,
    tokenizer_with,
)
from tests.helpers.worker.prompt_builders import builder_for

PROMPT = Prompt([{"role": "user", "content": "hello"}])


def names(tokenizer: Any, ids: Any) -> set[str]:
    return set(tokenizer.convert_ids_to_tokens(sorted(ids)))


@pytest.mark.parametrize(
    ("template", "headers", "ends", "opening"),
    [
        (CHATML, "<|im_start|>", "<|endoftext|> <|im_end|>", "<|im_start|>assistant\n"),
        (
            LLAMA,
            "<|start_header_id|>",
            "<|end_of_text|> <|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            GLM,
            "<|system|> <|user|> <|assistant|> <|observation|>",
            "<|endoftext|>",
            "<|assistant|>\n",
        ),
        (GEMMA, "<start_of_turn>", "<eos> <end_of_turn>", "<start_of_turn>model\n"),
        (HARMONY, "<|start|>", "<|return|>", "<|start|>assistant"),
        (
            PHI,  # it closes a conversation that asks for no answer
            "<|system|> <|user|> <|assistant|> <|tool|>",
            "<|endoftext|> <|end|>",
            "<|assistant|>\n",
        ),
        (MISTRAL, "[/INST]", "</s>", "[/INST]"),  # a question ends itself
        (PLAIN, "", "</s>", None),
    ],
    ids=["chatml", "llama3", "glm", "gemma", "harmony", "phi", "mistral", "plain"],
)
def test_a_template_shows_its_headers_and_ends(
    template: str, headers: str, ends: str, opening: str | None
) -> None:
    tokenizer = tokenizer_with(template)
    marks = turn_marks(tokenizer)
    assert names(tokenizer, marks.header_ids) == {*headers.split()}
    assert names(tokenizer, end_of_turn_ids(tokenizer, {})) == {*ends.split()}
    openings = [tokenizer.decode(list(each)) for each in marks.assistant_headers]
    assert openings == ([] if opening is None else [opening]), "one, whether it thinks or not"


def test_the_generation_config_adds_its_end_tokens() -> None:
    tokenizer = tokenizer_with(CHATML)
    assert 7 in end_of_turn_ids(tokenizer, {"eos_token_id": [7]})
    assert 8 in end_of_turn_ids(tokenizer, {"eos_token_id": 8})


def text_of(renderer: Renderer, prompt: Prompt) -> str:
    return renderer.render(prompt.messages, prompt.tools, prompt.template_kwargs).text


def ids_of(built: PromptBuilder, prompt: Prompt) -> list[int]:
    return built.build(PromptContent(prompt.messages, prompt.tools, prompt.template_kwargs)).ids


def test_thinking_follows_the_default_unless_the_request_says_otherwise() -> None:
    tokenizer = tokenizer_with(CHATML)
    off = Prompt(PROMPT.messages, template_kwargs={"enable_thinking": False})
    assert "</think>" in text_of(Renderer(tokenizer, True, True), off)
    assert "</think>" not in text_of(Renderer(tokenizer, True, True), PROMPT)
    assert "</think>" in text_of(Renderer(tokenizer, False, True), PROMPT)


@pytest.mark.parametrize(
    "name", ["tokenize", "conversation", "chat_template", "tokenizer_kwargs", "return_dict"]
)
def test_template_kwargs_cannot_change_what_rendering_is(name: str) -> None:
    """A template of the client's own could keep the prompt thread busy for ever."""
    prompt = Prompt(PROMPT.messages, template_kwargs={name: "{% for i in range(99) %}{% endfor %}"})
    with pytest.raises(RequestError, match=f"chat_template_kwargs has {name}"):
        text_of(Renderer(tokenizer_with(CHATML), True, True), prompt)


@pytest.mark.parametrize("name", TEXT_NAMES)
def test_the_marks_of_a_checkpoint_on_disk_are_found(name: str) -> None:
    """Loaded from files, most control tokens have no name of their own."""
    tokenizer = load_from_disk(fixture_dir(name))
    marks = turn_marks(tokenizer)
    assert names(tokenizer, marks.header_ids) == {"<|im_start|>"}
    heads = [tokenizer.decode(list(p)) for p in marks.assistant_headers]
    assert "<|im_start|>assistant\n" in heads
    assert {"<|im_end|>"} <= names(tokenizer, end_of_turn_ids(tokenizer, {}))


def test_a_model_without_a_template_gets_its_beginning_of_text() -> None:
    tokenizer = tokenizer_with(None)
    plain = bare_tokenizer(tokenizer).encode
    bare_tokenizer(tokenizer).encode = lambda text, add_special_tokens=True: (
        [1] * add_special_tokens + plain(text, add_special_tokens=False)
    )
    assert ids_of(builder_for(tokenizer, 1000), PROMPT)[:2] == [1, *plain("u")]


def test_what_a_template_refuses_is_the_requests_fault_and_counted() -> None:
    template = (
        CHATML + "{% if messages[0].content == 'x' %}{{ raise_exception('no x') }}{% endif %}"
    )
    SPECIALS[template] = SPECIALS[CHATML]
    renderer = Renderer(tokenizer_with(template), True, True)
    with pytest.raises(RequestError, match="chat template refuses these messages: no x"):
        text_of(renderer, Prompt([{"role": "user", "content": "x"}]))
    assert renderer.template_failures == 1


def test_a_prompt_that_does_not_fit_says_by_how_much() -> None:
    built = builder_for(tokenizer_with(CHATML), 64)
    with pytest.raises(PromptTooLong, match=r"The prompt is 138 tokens .* accepts 63") as caught:
        ids_of(built, Prompt([{"role": "user", "content": "x" * 100}]))
    assert caught.value.code == "context_length_exceeded"


def test_ten_megabytes_are_refused_without_tokenising_them() -> None:
    built = builder_for(tokenizer_with(CHATML), 4096)
    with pytest.raises(RequestError, match=r"10,000,0\d\d bytes"):
        ids_of(built, Prompt([{"role": "user", "content": "x" * 10_000_000}]))


def test_a_model_without_a_template_gets_a_transcript() -> None:
    renderer = Renderer(tokenizer_with(None), True, True)
    assert text_of(renderer, PROMPT) == "user: hello\nassistant:"


def test_a_mark_on_both_sides_of_a_result_begins_no_message() -> None:
    tokenizer = written_family("functiongemma").tokenizer
    assert "<escape>" not in names(tokenizer, turn_marks(tokenizer).header_ids)
