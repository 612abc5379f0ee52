"""A text is refused unread only where no tokens of the model could make it fit."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from hearth.worker.prompt.tokenise import longest_token_bytes
from scripts.harness.model_families import FAMILIES, family

ADDED = AddedToken("<|added|>")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPACES = normalizers.Replace(" ", "▁")


def tokenizer(
    added: AddedToken = ADDED, splits: Any = BYTES, normalizer: Any = None, fallback: bool = False
) -> Any:
    """Return one whose longest token of its own is of five characters, ten bytes."""
    vocab = {"a": 0, "ééééé": 1}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=fallback))
    if splits is not None:
        backend.pre_tokenizer = splits
    if normalizer is not None:
        backend.normalizer = normalizer
    literals = {**vocab, added.content: 2}
    return SimpleNamespace(
        backend_tokenizer=backend, added_tokens_decoder={2: added}, get_vocab=lambda: literals
    )


SHORT = AddedToken("<x>")
NFC = normalizers.NFC()
REMOVES = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTES])
ISOLATES = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), BYTES])


@pytest.mark.parametrize(
    ("found", "most"),
    [
        (tokenizer(), 9),  # the added token's
        (tokenizer(SHORT), 5),  # a byte each
        (tokenizer(SHORT, None, SPACES, fallback=True), 10),
        (tokenizer(SHORT, ISOLATES), 5),
        (tokenizer(SHORT, normalizer=NFC), 15),  # composing three bytes to one
        (tokenizer(SHORT, normalizer=normalizers.Sequence([NFC, SPACES])), 15),
        (tokenizer(AddedToken("<x>", rstrip=True)), None),  # it swallows any white space
        (tokenizer(AddedToken("<x>", lstrip=True)), None),
        (tokenizer(SHORT, None), None),  # one unknown token stands for any text
        (tokenizer(SHORT, REMOVES), None),
        (tokenizer(SHORT, pre_tokenizers.Whitespace(), fallback=True), None),
        (tokenizer(SHORT, normalizer=normalizers.Strip()), None),
        (tokenizer(SHORT, normalizer=normalizers.Replace("a", "")), None),
        (SimpleNamespace(), None),  # a slow one
    ],
)
def test_the_longest_token_is_told_only_where_no_text_can_be_shorter(found: Any, most: Any) -> None:
    assert longest_token_bytes(found) == most


TEXTS = st.lists(
    st.sampled_from(["the ", "    ", "\n", "e\u0301", "日本", "<|im_end|>"]) | st.text()
)


@given(st.sampled_from(sorted(FAMILIES)), TEXTS.map("".join))
def test_no_text_has_fewer_tokens_than_its_bytes_allow(name: str, text: str) -> None:
    fast = family(name).tokenizer
    most = longest_token_bytes(fast)
    assert most is not None
    ids = fast.encode(text, add_special_tokens=False)
    assert len(text.encode()) <= most * len(ids)
