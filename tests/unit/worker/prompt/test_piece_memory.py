"""The memory of token ids, and a tokenizer's own, serve the key alone whose text they are of."""

from functools import cache
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from tokenizers import Tokenizer, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from hearth.worker.prompt import tokenise
from hearth.worker.prompt.tokenise import PieceTokeniser
from scripts.fixtures.fixture_cache import fixture_dir


@cache
def tokenizer_of(kind: str) -> Any:
    if kind == "slow":
        return TokenizerWrapper(ByT5Tokenizer())
    if kind == "unigram":
        backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False))
        return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=backend))
    return load(fixture_dir("qwen3"))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were encoded, and where the tokenizer's words were forgotten, in order."""
    steps: list[str] = []
    recall = tokenise.PieceCache.recall

    def noted(memory: Any, owner: str, key: tuple[str, bool], encode: Any) -> tuple[int, ...]:
        def encoded() -> list[int]:
            steps.append(key[0])
            ids: list[int] = encode()
            return ids

        return recall(memory, owner, key, encoded)

    monkeypatch.setattr(tokenise.PieceCache, "recall", noted)
    monkeypatch.setattr(tokenise, "stop_words", lambda _: steps.append("forgotten"))
    return steps


@pytest.mark.parametrize("kind", ["fixture", "slow"])
def test_a_text_that_another_key_has_sent_is_encoded_anew(done: list[str], kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    tokeniser = PieceTokeniser(tokenizer, "")
    done.clear()
    text = "the code is swordfish 7731"
    found = [tokeniser.ids(text, owner=owner) for owner in ("mine", "mine", "theirs", "mine")]
    assert [step for step in done if step == text] == [text] * 2, "B pays what A paid, A pays once"
    assert all(ids == tokenizer.encode(text, add_special_tokens=False) for ids in found)


def test_a_tokenizer_remembers_no_words_from_the_first_text_on_that_is_one_keys(
    done: list[str],
) -> None:
    tokeniser = PieceTokeniser(tokenizer_of("fixture"), "")
    done.clear()
    for number, owner in enumerate(("", "", "mine", "mine", "theirs", "")):
        tokeniser.ids(f"{number}", owner=owner)
    assert done == ["0", "1", "forgotten", "2", "3", "4", "5"]


@pytest.mark.parametrize("kind", ["fixture", "unigram"])
def test_the_words_that_a_tokenizer_remembers_can_be_forgotten(kind: str) -> None:
    model = tokenizer_of(kind).backend_tokenizer.model
    assert {"_clear_cache", "_resize_cache"} <= set(dir(model)), "tokenizers calls it so"
    text = "swordfish swordfish eggs"
    before = tokenizer_of(kind).encode(text)
    tokenise.stop_words(tokenizer_of(kind))
    assert [tokenizer_of(kind).encode(text) for _ in range(2)] == [before, before]
