"""Texts to tokens and back, as the tokenizer itself does it, on the tokenizers of many families."""

from functools import cache
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Count, Counted, Prompt, TokenQuery
from hearth.worker.prompt.prompt_with_sampled_turns import PromptContent
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.threads.prompt_thread import counted
from hearth.worker.threads.request_builder import PromptFacts, SessionPromptBuilder
from scripts.harness.model_families import family
from tests.helpers.worker.prompt_builders import builder, encoded

FAMILIES = ("qwen3", "llama3", "harmony", "gemma3", "mistral")
NOTHING = cast(Any, None)


@cache
def prompts_of(name: str) -> SessionPromptBuilder:
    facts = cast(PromptFacts, SimpleNamespace(vocabulary=Vocabulary(family(name).tokenizer)))
    return SessionPromptBuilder(builder(name, context_tokens=8), NOTHING, facts)


def ask(name: str, prompt: Prompt, **query: Any) -> Counted:
    return counted(Count("r", prompt, query=TokenQuery(**query)), {}, prompts_of(name))


def ids_of(found: Counted) -> list[int]:
    ids: list[int] = np.frombuffer(found.ids, dtype="<u4").tolist()
    assert len(ids) == found.tokens
    return ids


def bare(name: str, text: str, **query: Any) -> list[int]:
    return ids_of(ask(name, Prompt([], text=text), tells="ids", adds_beginning=False, **query))


TEXTS = st.lists(
    st.text(max_size=8) | st.sampled_from(["<|im_end|>", "<think>", "[INST]", "\n\n", "  ", "é🦊"]),
    max_size=6,
).map("".join)


@given(st.sampled_from(FAMILIES), TEXTS)
def test_a_text_has_the_tokenizers_own_tokens_and_comes_back_as_it_decodes_them(
    name: str, text: str
) -> None:
    ids = bare(name, text)
    assert ids == encoded(name, text)
    back = ask(name, Prompt([], ids=ids) if ids else Prompt([], text=""), tells="text")
    assert back.text == family(name).tokenizer.decode(ids)
    pieces = ask(name, Prompt([], text=text), tells="pieces", adds_beginning=False)
    assert ids_of(pieces) == ids
    ends = np.frombuffer(pieces.piece_ends, dtype="<u4").tolist()
    assert len(ends) == len(ids) and ends == sorted(ends)
    assert ends[-1:] == ([len(pieces.pieces)] if ids else [])
    assert pieces.pieces.decode("utf-8", "replace") == back.text


@given(st.sampled_from(FAMILIES), TEXTS)
def test_a_text_whose_controls_are_not_read_has_no_control_token(name: str, text: str) -> None:
    ids = bare(name, text, reads_controls=False)
    made_by_template = builder(name).tokeniser.controls
    words = family(name).tokenizer.convert_ids_to_tokens(ids)
    assert made_by_template.isdisjoint(words)
    assert family(name).tokenizer.decode(ids) == text


def test_a_beginning_is_put_where_the_tokenizer_has_one_and_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = Prompt([], text="Hi")
    monkeypatch.setattr(builder("qwen3", context_tokens=8).tokeniser, "beginning", [3])
    assert ids_of(ask("qwen3", text, tells="ids")) == [3, *encoded("qwen3", "Hi")]
    assert bare("qwen3", "Hi") == encoded("qwen3", "Hi")


def test_a_text_may_be_longer_than_the_context_and_a_token_must_be_one() -> None:
    assert len(bare("qwen3", "one two three " * 20)) > 8
    assert ask("qwen3", Prompt([], text="one two")).ids == b"", "a count tells no more"
    with pytest.raises(RequestError, match="no token of this model"):
        ask("qwen3", Prompt([], ids=[10**9]), tells="text")


@pytest.mark.parametrize("has_header", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_messages_longer_than_the_context_are_counted_here_to_the_token(
    name: str, has_header: bool
) -> None:
    """So that no count has a reason to be asked of another server."""
    said = [{"role": "user", "content": "a word " * 400}]
    whole = builder(name).build(PromptContent(said, []), has_header)
    narrow = builder(name, context_tokens=8)
    facts = cast(PromptFacts, SimpleNamespace(vocabulary=Vocabulary(family(name).tokenizer)))
    nobody = Mock(request_arrived=Mock(return_value=None))  # no session is known
    prompts = SessionPromptBuilder(narrow, nobody, facts)
    query = TokenQuery(adds_header=has_header)
    found = counted(Count("r", Prompt(said), query=query), {}, prompts)
    assert found.tokens == len(whole.ids) > 400
    with pytest.raises(RequestError, match="context"):
        narrow.build(PromptContent(said, []))
