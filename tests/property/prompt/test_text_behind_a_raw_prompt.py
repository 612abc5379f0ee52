"""A raw completion is what decoding the prompt with it has more than decoding the prompt."""

from functools import cache
from typing import Any, cast

import pytest
from hypothesis import example, given, strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hearth.shared.settings import load_settings
from hearth.shared.wire_messages import Prompt, Sampling, Submit
from hearth.worker.cache.block_hash import root_hash
from hearth.worker.prompt.prefill_cuts import CutRule, TurnMarks
from hearth.worker.schedule.request_state import ClientLease
from hearth.worker.setup.prompt_and_session_setup import make_builder, make_sessions
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.threads.request_builder import (
    PromptFacts,
    RecentPrompts,
    RequestBuilder,
    SessionPromptBuilder,
)

NOTHING = cast(Any, None)
BEGIN = "<s>"
WORDS = (
    *("\u2581", "\u2581\u2581", "\u2581love", "love", "\u2581I", "I", "\u2581a", "a", "\n", "\n\n"),
    *(".", "é", "\u2581é", "日", "def", "\u2581def", "\u2581\u2581\u2581\u2581return"),
)
FOX = [f"<0x{octet:02X}>" for octet in "🦊".encode()]
BYTES = [f"<0x{octet:02X}>" for octet in range(256)]
PROMPTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12)
ANSWERS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8)


def metaspace(strips: bool) -> PreTrainedTokenizerFast:
    """Return a SentencePiece tokenizer: as Llama 2 has it where it `strips`, or as Gemma."""
    vocabulary = {word: at for at, word in enumerate(["<unk>", BEGIN, "</s>", *BYTES, *WORDS])}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * strips)])
    made.add_special_tokens([AddedToken(word, special=True) for word in (BEGIN, "</s>", "<unk>")])
    names = {"bos_token": BEGIN, "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, clean_up_tokenization_spaces=False, **names
    )


@cache
def tools_of(strips: bool) -> tuple[PreTrainedTokenizerFast, RequestBuilder]:
    bare = metaspace(strips)
    tokenizer, ends = TokenizerWrapper(bare), frozenset([bare.eos_token_id])
    marks, configured = TurnMarks(frozenset(), frozenset()), load_settings({}, None)
    prompts = make_builder(tokenizer, marks, ends, 1_000, configured)
    words, rule = Vocabulary(tokenizer), CutRule(64, marks)
    facts = PromptFacts(1_000, len(bare), root_hash(("m",)), NOTHING, NOTHING, words, rule)
    sessions = SessionPromptBuilder(prompts, make_sessions(configured, 64), facts)
    return bare, RequestBuilder(sessions, RecentPrompts(False), 64)


def completed(strips: bool, prompt: list[int], answer: list[int]) -> str:
    """Return the text of `answer` as a request for a completion of `prompt` sends it."""
    message = Submit("r", Prompt([], ids=prompt), Sampling())
    output = tools_of(strips)[1].build(ClientLease("r", b"peer"), message).output
    pieces = [output.add(token, None) for token in answer]
    pieces.append(output.finish(is_complete=True))
    return "".join(part.text for piece in pieces for part in piece.parts)


def more(strips: bool, prompt: list[int], answer: list[int]) -> str:
    """Return what decoding both has more than decoding the prompt."""
    decode = tools_of(strips)[0].decode
    before = decode(prompt, skip_special_tokens=True).rstrip("\ufffd")
    return decode([*prompt, *answer], skip_special_tokens=True).removeprefix(before)


@pytest.mark.parametrize("strips", [True, False], ids=["llama", "gemma"])
@given(PROMPTS, ANSWERS, st.booleans(), st.integers(0, 4) | st.none())
@example(["\u2581I"], ["\u2581love"], False, None)
@example(["\u2581def", "\n"], ["\u2581\u2581\u2581\u2581return"], True, None)
@example(["a"] * 9, ["\u2581", "\u2581a"], True, 2)
def test_a_completion_keeps_its_first_blank_and_a_character_that_the_prompt_begins(
    strips: bool, prompt: list[str], answer: list[str], begins: bool, cut: int | None
) -> None:
    """`cut`: after how many bytes of a fox the prompt ends."""
    fox = FOX if cut is not None else []
    to_ids = tools_of(strips)[0].convert_tokens_to_ids
    asked = to_ids([*([BEGIN] if begins else []), *prompt, *fox[: cut or 0]])
    said = to_ids([*fox[cut or 0 :], *answer])
    assert completed(strips, asked, said) == more(strips, asked, said)


@given(PROMPTS, ANSWERS)
@example(["\u2581def", "\n"], ["\u2581\u2581\u2581\u2581return"])
@example(["\u2581I"], ["\n", "\u2581love"])
def test_an_indented_line_keeps_its_first_blank_where_the_decoder_is_metaspace(
    prompt: list[str], answer: list[str]
) -> None:
    bare = metaspace(strips=False)
    bare.backend_tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    asked, said = bare.convert_tokens_to_ids(prompt), bare.convert_tokens_to_ids(answer)
    detokeniser = Vocabulary(TokenizerWrapper(bare)).detokeniser(asked)
    text = "".join(map(detokeniser.add, said))
    assert bare.decode(asked) + text == bare.decode([*asked, *said])
