"""Incremental text against decoding everything at once, for each kind of tokenizer."""

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hearth.worker.stream.detokenise import Vocabulary

CORPUS = ["the quick brown fox — über 日本語 🦊 naïve", "def f(x):\n    return x\n"] * 20


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(
        [AddedToken("<|im_end|>", special=True), AddedToken("<｜end｜>", special=False)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581ab"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()


def streamed(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    detokeniser = Vocabulary(tokenizer).detokeniser()
    return "".join(detokeniser.add(token_id) for token_id in ids)


@given(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=40))
def test_byte_level_text_is_what_decoding_all_gives(ids: list[int]) -> None:
    whole = BYTE_LEVEL.decode(ids, clean_up_tokenization_spaces=False)
    # Bytes at the end that are no character yet are held back; decoding all shows them as U+FFFD.
    text = streamed(BYTE_LEVEL, ids)
    assert whole.startswith(text)
    assert set(whole[len(text) :]) <= {"\ufffd"}


@given(st.text(max_size=30))
def test_a_character_spread_over_tokens_appears_whole(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert streamed(BYTE_LEVEL, ids) == text


@given(st.lists(st.sampled_from([257, 258, 259, 260, 0xE3 + 1, 0x81 + 1, 0x82 + 1]), max_size=12))
def test_byte_fallback_text_has_the_characters_and_not_the_first_space(ids: list[int]) -> None:
    pieces = [b" ", b"a", b"b", b" ab"]
    raw = b"".join(pieces[i - 257] if i >= 257 else bytes([i - 1]) for i in ids)
    text = streamed(BYTE_FALLBACK, ids)
    whole = raw.decode("utf-8", "replace")
    expected = whole.removeprefix(" ")
    assert expected.startswith(text) and set(expected[len(text) :]) <= {"\ufffd"}


def test_byte_fallback_agrees_with_the_tokenizer_on_real_characters() -> None:
    ids = [260, 0xE3 + 1, 0x81 + 1, 0x82 + 1, 257, 258]
    assert streamed(BYTE_FALLBACK, ids) == BYTE_FALLBACK.decode(ids) == "abあ a"


@pytest.mark.parametrize("token_id", [10**6, len(BYTE_LEVEL)])
def test_an_id_beyond_the_tokenizer_has_no_text(token_id: int) -> None:
    assert streamed(BYTE_LEVEL, [token_id]) == ""
    assert Vocabulary(BYTE_LEVEL).token_bytes(token_id) == b""


def test_added_tokens_show_as_they_are_written() -> None:
    ids = BYTE_LEVEL.convert_tokens_to_ids(["<|im_end|>", "<｜end｜>"])
    assert streamed(BYTE_LEVEL, ids) == "<|im_end|><｜end｜>"
