"""A raw prompt is its caller's own template: no chat template, and control tokens as spelled."""

from functools import cache

import pytest
from hypothesis import given, strategies as st
from tokenizers.processors import TemplateProcessing

from hearth.shared.errors import PromptTooLong, RequestError
from hearth.worker.prompt.prompt_with_sampled_turns import PromptBuilder
from scripts.harness.model_families import FAMILIES, family
from tests.helpers.worker.prompt_builders import builder_for


@cache
def builder(name: str, context_tokens: int = 1_000) -> PromptBuilder:
    return builder_for(family(name).tokenizer, context_tokens)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_a_text_is_tokenised_as_the_tokenizer_does_it(name: str, data: st.DataObject) -> None:
    each = family(name)
    pieces = st.one_of(st.sampled_from((*each.controls, *each.marks)), st.text(max_size=9))
    text = "".join(data.draw(st.lists(pieces, min_size=1, max_size=6).filter(any)))
    prompt = builder(name).raw(text, [])
    assert prompt.ids == each.tokenizer.encode(text)
    assert (prompt.header, prompt.kept, prompt.doubtful) == (len(prompt.ids), frozenset(), 0)


def test_the_beginning_of_text_is_added_once() -> None:
    tokenizer = family("llama3").tokenizer
    backend = tokenizer.backend_tokenizer
    plain = tokenizer.encode("a", add_special_tokens=False)
    start = tokenizer.convert_tokens_to_ids("<|begin_of_text|>")
    known = backend.post_processor
    try:
        backend.post_processor = TemplateProcessing(
            single="<|begin_of_text|> $A <|eot_id|>",
            special_tokens=[
                ("<|begin_of_text|>", start),
                ("<|eot_id|>", tokenizer.convert_tokens_to_ids("<|eot_id|>")),
            ],
        )
        adding = builder_for(tokenizer)
    finally:
        backend.post_processor = known
    assert adding.raw("a", []).ids == [start, *plain], "and nothing of what ends a text"
    assert adding.raw("<|begin_of_text|>a", []).ids == [start, *plain]
    assert adding.raw("", []).ids == [start]
    assert adding.raw(None, [5]).ids == [5]


def test_ids_are_taken_as_they_are() -> None:
    assert builder("qwen3").raw(None, [0, 7, 0]).ids == [0, 7, 0]


@pytest.mark.parametrize("wrong", [-1, 3_072, 10**12])
def test_an_id_that_is_no_token_is_refused(wrong: int) -> None:
    highest = max(family("qwen3").tokenizer.get_vocab().values())
    assert builder("qwen3").raw(None, [highest]).ids == [highest]
    with pytest.raises(RequestError, match=rf"1 ids that are no token .* {wrong}\. .* {highest:,}"):
        builder("qwen3").raw(None, [1, wrong])
    with pytest.raises(RequestError):
        builder("qwen3").raw(None, [highest + 1])


def test_a_raw_prompt_has_the_same_limits_as_any() -> None:
    small = builder("qwen3", 50)
    with pytest.raises(PromptTooLong):
        small.raw(None, [1] * 50)
    with pytest.raises(PromptTooLong):
        small.raw("q " * 100, [])
    with pytest.raises(RequestError, match=r"bytes and this server's context is 50 tokens"):
        small.raw("q" * 5_000, [])
    for text in (None, ""):
        with pytest.raises(RequestError, match="The prompt is empty"):
            small.raw(text, [])
