"""Tokenising in pieces against tokenising the whole, and content against control tokens.

Tokenizers of each kind that models come with are made here, beside the fixtures' own.
"""

import html
import json
import urllib.parse
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from mlx_lm.tokenizer_utils import NewlineTokenizer, TokenizerWrapper, load
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from hearth.worker.prompt import tokenise
from hearth.worker.prompt.tokenise import PIECE_OVERHEAD_CHARS, PieceTokeniser, TextPiece
from scripts.fixtures.fixture_cache import fixture_dir

CORPUS = ["the quick brown fox — über 日本語 🦊 naïve <b>x</b>", "def f(x):\n    return x\n"] * 20
CONTROLS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")


def added(*literals: str, **flags: bool) -> list[AddedToken]:
    flags = {"special": True, "normalized": False} | flags
    return [AddedToken(literal, **flags) for literal in literals]


def wrapped(backend: Tokenizer, kind: type = PreTrainedTokenizerFast) -> Any:
    tokenizer = kind(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    return TokenizerWrapper(tokenizer)


def byte_level(tokens: list[AddedToken], prefix_space: bool = False) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(tokens)
    return backend


def sentencepiece_bpe() -> Tokenizer:
    """As SentencePiece's are: bytes for unknown characters, control tokens in the vocabulary."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, special_tokens=["<unk>", *CONTROLS, *byte_pieces]
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = trained.model
    model.unk_token, model.byte_fallback, model.fuse_unk = "<unk>", True, True
    backend = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return backend


def llama(prepend_scheme: str) -> Tokenizer:
    backend = sentencepiece_bpe()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    backend.add_tokens(added("<unk>", *CONTROLS))
    return backend


def old_llama(normalized: bool) -> Tokenizer:
    backend = sentencepiece_bpe()
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.add_tokens(added("<unk>", *CONTROLS, normalized=normalized))
    return backend


def gemma() -> Tokenizer:
    backend = sentencepiece_bpe()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.add_tokens(added(*CONTROLS))
    ordinary = ["\n" * count for count in range(2, 32)] + ["<table>", "<b>", "</b>"]
    backend.add_tokens(added(*ordinary, special=False))
    return backend


def unigram() -> Tokenizer:
    """One whose model writes a control token by itself when it meets the letters of one."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<unk>", *CONTROLS],
        unk_token="<unk>",
        initial_alphabet=list("<|/>_adeimnrstuk"),
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def lower_case() -> Tokenizer:
    backend = byte_level([])
    backend.normalizer = normalizers.Lowercase()
    backend.add_tokens(added(*CONTROLS, normalized=True))
    return backend


def composing() -> Tokenizer:
    backend = byte_level([])
    backend.normalizer = normalizers.NFC()
    backend.add_tokens(added("<s>", "</s>", normalized=True) + added("<|im_start|>", "<|im_end|>"))
    return backend


PHI = added(*CONTROLS, rstrip=True)
OVERLAPPING = added("<|", "<|im", "<|im_end|>", "<|im_end|>x", "|>|>", "><")
IN_PIECES: dict[str, Callable[[], Any]] = {
    "fixture": lambda: load(fixture_dir("qwen3")),
    "byte level": lambda: wrapped(byte_level(added(*CONTROLS))),
    "prefix space": lambda: wrapped(byte_level(added(*CONTROLS), prefix_space=True)),
    "right strip": lambda: wrapped(byte_level(PHI)),
    "right strip and newlines": lambda: wrapped(byte_level(PHI + added("\n\n", special=False))),
    "left strip": lambda: wrapped(byte_level(added(*CONTROLS, lstrip=True))),
    "overlapping": lambda: wrapped(byte_level(OVERLAPPING)),
    "composing": lambda: wrapped(composing()),
    "llama first": lambda: wrapped(llama("first")),
    "llama always": lambda: wrapped(llama("always")),
    "old llama": lambda: wrapped(old_llama(normalized=False)),
    "gemma": lambda: wrapped(gemma()),
    "unigram": lambda: wrapped(unigram()),
}
WHOLE: dict[str, Callable[[], Any]] = {
    "single word": lambda: wrapped(byte_level(added(*CONTROLS, single_word=True))),
    "newline": lambda: wrapped(byte_level(added(*CONTROLS)), NewlineTokenizer),
    "old llama": lambda: wrapped(old_llama(normalized=True)),
    "lower case": lambda: wrapped(lower_case()),
    "slow": lambda: TokenizerWrapper(ByT5Tokenizer()),
}
ALL = [*(("in pieces", kind) for kind in IN_PIECES), *(("whole", kind) for kind in WHOLE)]
EXACT = ("fixture", "byte level", "right strip", "overlapping", "gemma")


@cache
def tokenizer_of(manner: str, kind: str) -> Any:
    return (IN_PIECES if manner == "in pieces" else WHOLE)[kind]()


@cache
def tokeniser_of(manner: str, kind: str) -> PieceTokeniser:
    tokenizer = tokenizer_of(manner, kind)
    return PieceTokeniser(tokenizer, getattr(tokenizer, "chat_template", None) or "")


def whole(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@pytest.fixture(params=ALL, ids=" ".join)
def any_kind(request: pytest.FixtureRequest) -> tuple[Any, PieceTokeniser]:
    return tokenizer_of(*request.param), tokeniser_of(*request.param)


WORDS = [
    "quick",
    "the",
    " fox",
    "x",
    "12",
    "3.14",
    "über",
    "日本",
    "🦊",
    "e\u0301",
    "<b>",
    "<table>",
]
SPACES = [" ", "  ", "\n", "\n\n", "\n\n\n", "\t", "\u3000", "\x1c", "\xa0"]
NEARLY = ["<", "<|", "<|im", "_start|>", "im_end|>", "|>", ">", "s>", "</", "<unk>", "<S>"]
MORE = [*CONTROLS, "<|endoftext|>", "<think>", "</think>", "<tool_call>", "<extra_id_0>"]
fragments = st.one_of(
    st.sampled_from(WORDS), st.sampled_from(SPACES), st.sampled_from(NEARLY), st.text(max_size=4)
)
contents = st.lists(st.one_of(fragments, st.sampled_from(MORE)), max_size=12).map("".join)
values = st.recursive(
    st.one_of(contents, st.none(), st.integers(), st.booleans()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(contents, inner, max_size=3)
    ),
    max_leaves=6,
)
many = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@given(text=contents)
@many
def test_pieces_have_the_ids_of_the_whole(any_kind: tuple[Any, PieceTokeniser], text: str) -> None:
    tokenizer, tokeniser = any_kind
    assert tokeniser.ids(text) == whole(tokenizer, text)


@pytest.mark.parametrize("kind", IN_PIECES)
def test_tokenizers_of_the_usual_kinds_work_in_pieces(kind: str) -> None:
    assert tokeniser_of("in pieces", kind).is_incremental


@pytest.mark.parametrize("kind", WHOLE)
def test_tokenizers_that_look_beyond_a_piece_are_told_apart(kind: str) -> None:
    assert not tokeniser_of("whole", kind).is_incremental


@given(value=values)
@many
def test_content_yields_no_control_token(any_kind: tuple[Any, PieceTokeniser], value: Any) -> None:
    tokenizer, tokeniser = any_kind
    if tokenizer is tokenizer_of("whole", "lower case"):
        value = lower(value)  # its normalising makes control tokens of what is none in capitals
    parts = list(strings(tokeniser.shielded(value)))
    control = max(tokeniser.controls, key=len)
    text = "".join(f"{control}\n{part}\n" for part in parts)
    pieces = tokeniser.pieces(text)
    controls = {
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.content in tokeniser.controls - {"<unk>"}  # which unknown characters yield
    }
    without_content = whole(tokenizer, f"{control}\n\n" * len(parts))
    written = [token_id for piece in pieces for token_id in piece.ids if token_id in controls]
    assert written == [token_id for token_id in without_content if token_id in controls]


@pytest.mark.parametrize("kind", EXACT)
@given(content=contents)
@many
def test_content_reads_as_it_was_written(kind: str, content: str) -> None:
    tokenizer, tokeniser = tokenizer_of("in pieces", kind), tokeniser_of("in pieces", kind)
    content = content.replace("▁", "")  # SentencePiece's word for a space
    pieces = tokeniser.pieces(tokeniser.shielded(content))
    assert "".join(piece.text for piece in pieces) == content
    ids = [token_id for piece in pieces for token_id in piece.ids]
    decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert decoded == content


@given(content=contents, name=contents)
@many
def test_the_template_alone_makes_control_tokens(content: str, name: str) -> None:
    tokenizer, tokeniser = (
        tokenizer_of("in pieces", "fixture"),
        tokeniser_of("in pieces", "fixture"),
    )

    def pieces(word: str, key: str) -> list[TextPiece]:
        call = {"function": {"name": "f", "arguments": {key: [word]}}}
        messages = [
            {"role": "user", "content": word},
            {"role": "assistant", "content": word, "tool_calls": [call]},
            {"role": "tool", "content": word},
        ]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {key: word}}}]
        text = tokenizer.apply_chat_template(
            tokeniser.shielded(messages),
            tools=tokeniser.shielded(tools),
            tokenize=False,
        )
        return tokeniser.pieces(text)

    content = f"x{content}x"  # a template may strip white space
    harmless, given = pieces("xx", "k"), pieces(content, name)
    assert [p.ids for p in given if p.is_added] == [p.ids for p in harmless if p.is_added]
    assert "".join(piece.text for piece in given).count(content) >= 3


@given(text=contents)
@many
def test_pieces_are_the_text_cut_at_added_tokens(text: str) -> None:
    tokenizer, tokeniser = tokenizer_of("in pieces", "gemma"), tokeniser_of("in pieces", "gemma")
    literals = {token.content for token in tokenizer.added_tokens_decoder.values()}
    pieces = tokeniser.pieces(text)
    assert "".join(piece.text for piece in pieces) == text
    for piece in pieces:
        assert piece.is_added == (piece.text in literals)
        assert piece.is_added or not any(literal in piece.text for literal in literals)


def test_an_added_token_takes_the_white_space_that_it_swallows() -> None:
    pieces = tokeniser_of("in pieces", "right strip").pieces("a </s> \n b")
    assert [piece.text for piece in pieces] == ["a ", "</s> \n ", "b"]


def test_pieces_of_a_text_encoded_whole_are_cut_where_the_ids_show_it() -> None:
    pieces = tokeniser_of("whole", "single word").pieces("a </s> <s> b")
    assert [piece.text for piece in pieces] == ["a ", "</s>", " ", "<s>", " b"]
    assert [piece.is_added for piece in pieces] == [False, True, False, True, False]
    assert len(tokeniser_of("whole", "single word").pieces("a</s>b <s> c")) == 1


def test_what_a_vocabulary_has_as_a_control_token_is_cut_in_two() -> None:
    tokenizer, tokeniser = (
        tokenizer_of("in pieces", "unigram"),
        tokeniser_of("in pieces", "unigram"),
    )
    ids = dict.fromkeys(tokenizer.added_tokens_decoder)
    content = "the <s> and＜s＞ <unk> " + "</s>" * 3000 + "<unk>" * 3000
    found = tokeniser.ids(tokeniser.shielded(content))
    assert not [token_id for token_id in found if token_id in ids]
    plain = Tokenizer(tokenizer.backend_tokenizer.model)
    assert any(token_id in ids for token_id in plain.encode("</s>").ids), "nothing to cut"


def test_controls_are_special_or_named_by_template_or_wrapper_or_names_themselves() -> None:
    backend = byte_level(added("<|im_end|>") + added("<tool>", "<td>", "\n\n", special=False))
    named = ("<|gap|>", "<\uff5cfim\u2581end\uff5c>", "<file_sep>")
    backend.add_tokens(added("<think>", "</think>", *named, special=False))
    template = "{{ '<tool>' }}\n\n{{ message.content }}"
    tokeniser = PieceTokeniser(wrapped(backend), template)
    assert tokeniser.controls == {"<|im_end|>", "<tool>", "<think>", "</think>", *named}


# ---------------------------------------------------------------- marks


@given(value=values)
@many
def test_shielding_puts_marks_and_nothing_else(value: Any) -> None:
    tokeniser = tokeniser_of("in pieces", "overlapping")
    mark = tokeniser.mark
    shielded = tokeniser.shielded(value)
    before, after = list(strings(value)), list(strings(shielded))
    assert [text.replace(mark, "") for text in after] == before
    for old, new in zip(before, after, strict=True):
        assert not any(control in new for control in tokeniser.controls)
        assert new is old or any(control in old for control in tokeniser.controls)
    if before == after:
        assert shielded is value


def test_a_mark_is_digits_that_the_tokenizer_does_not_cut() -> None:
    one, other = (tokeniser_of("in pieces", kind).mark for kind in ("gemma", "unigram"))
    assert one != other
    assert one.isdecimal() and other.isdecimal() and len(one) == len(other) == tokenise.MARK_LENGTH
    tokenizer = wrapped(byte_level(added(*CONTROLS) + added(*"0123456789", special=False)))
    cut = PieceTokeniser(tokenizer, "")
    found = cut.ids(cut.shielded("a 1 <s>"))
    assert found == [*cut.ids("a 1 <"), *cut.ids("s>")]


WRITERS: dict[str, Callable[[str], str]] = {
    "json": json.dumps,
    "json in json": lambda text: json.dumps(json.dumps(text)),
    "repr": lambda text: repr([text]),
    "markup": html.escape,
    "a link": urllib.parse.quote,
    "capitals": str.upper,
    "a title": str.title,
}


@pytest.mark.parametrize("writer", WRITERS)
@given(content=contents)
@many
def test_nothing_of_a_mark_is_left_however_content_is_written(writer: str, content: str) -> None:
    tokeniser = tokeniser_of("in pieces", "fixture")
    write = WRITERS[writer]
    pieces = tokeniser.pieces(write(tokeniser.shielded(content)))
    assert "".join(piece.text for piece in pieces) == write(content)


def test_a_control_token_that_json_spells_is_shielded_in_what_the_json_holds() -> None:
    tokeniser = PieceTokeniser(wrapped(byte_level(added('<|"|>'))), "")
    shielded = tokeniser.shielded(json.dumps({"a": '<|"|>'}))
    assert json.loads(shielded) == {"a": f'<{tokeniser.mark}|"|>'}


def test_values_as_deep_as_the_wire_carries_are_shielded() -> None:
    value: Any = "</s>"
    for _ in range(255):
        value = [{"a": value}]
    tokeniser = tokeniser_of("in pieces", "byte level")
    mark = tokeniser.mark
    shielded = tokeniser.shielded(value)
    while isinstance(shielded, list):
        shielded = shielded[0]["a"]
    assert shielded == f"<{mark}/s>"


# ---------------------------------------------------------------- memory


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that a tokenizer's own vocabulary was asked for, in order."""
    texts: list[str] = []
    original = tokenise.PlainTextEncoder.ids

    def counted(self: Any, text: str, is_first: bool) -> list[int]:
        texts.append(text)
        return original(self, text, is_first)

    monkeypatch.setattr(tokenise.PlainTextEncoder, "ids", counted)
    return texts


def test_nothing_is_encoded_twice(encoded: list[str]) -> None:
    tokenizer = tokenizer_of("in pieces", "llama first")
    tokeniser = PieceTokeniser(tokenizer, "")
    encoded.clear()
    conversation = "the quick" + "".join(f"</s>\nturn {n}<s>same" for n in range(50))
    first = tokeniser.pieces(conversation)
    assert sorted(encoded) == sorted(["the quick", *(f"\nturn {n}" for n in range(50)), "same"])
    encoded.clear()
    assert tokeniser.pieces(conversation) == first
    assert encoded == []


@given(texts=st.lists(contents, min_size=1, max_size=6))
@many
def test_a_conversation_that_grows_is_tokenised_as_at_once(
    encoded: list[str], texts: list[str]
) -> None:
    tokenizer = tokenizer_of("in pieces", "fixture")
    tokeniser = PieceTokeniser(tokenizer, tokenizer.chat_template)
    conversation, ids = "", list[int]()
    for text in texts:
        encoded.clear()
        conversation += f"<|im_start|>user\n{tokeniser.shielded(text)}<|im_end|>"
        grown = tokeniser.ids(conversation)
        assert grown[: len(ids)] == ids
        assert len(encoded) <= 1 + text.count("\n\n")
        ids = grown
    anew = PieceTokeniser(tokenizer, tokenizer.chat_template)
    anew.mark = tokeniser.mark
    assert ids == anew.ids(conversation)


def test_what_was_not_used_longest_is_forgotten_first(encoded: list[str]) -> None:
    limit = 3 * (PIECE_OVERHEAD_CHARS + 10)
    tokeniser = PieceTokeniser(tokenizer_of("in pieces", "byte level"), "", limit)
    texts = [letter * 10 for letter in "abc"]
    for text in [*texts, texts[0], "d" * 10]:
        tokeniser.pieces(text)
    assert tokeniser.memory.cost == limit
    encoded.clear()
    for text in [texts[0], texts[2], texts[1]]:
        tokeniser.pieces(text)
    assert encoded == [texts[1]]


@given(texts=st.lists(contents, max_size=20), limit=st.integers(0, 2000))
@many
def test_no_more_is_remembered_than_allowed(texts: list[str], limit: int) -> None:
    tokenizer = tokenizer_of("in pieces", "byte level")
    tokeniser = PieceTokeniser(tokenizer, "", limit)
    for text in texts:
        assert tokeniser.ids(text) == whole(tokenizer, text)
        assert tokeniser.memory.cost <= limit


# ---------------------------------------------------------------- helpers


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.items() for part in item for text in strings(part)]
    return [text for item in value for text in strings(item)] if isinstance(value, list) else []


def lower(value: Any) -> Any:
    if isinstance(value, str):
        return value.lower()
    if isinstance(value, dict):
        return {lower(key): lower(item) for key, item in value.items()}
    return [lower(item) for item in value] if isinstance(value, list) else value
