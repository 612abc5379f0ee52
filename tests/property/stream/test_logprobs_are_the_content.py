"""Log probabilities are the content's tokens, byte for byte, and their order is a full sort's."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from hearth.shared.wire_messages import TokenLogprob
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.stream.logprobs import describe
from hearth.worker.stream.output_processor import OutputPiece, OutputProcessor
from scripts.harness.model_families import FAMILIES, family, tools_for

CALL = ToolCall("f", {"a": "Hello 🦊"})
WORDS = (
    *(
        "Hello",
        "🦊",
        "wörld",
        " ",
        "\n",
        "\n\n",
        "  ",
        "é",
        "日本",
        "👩\u200d👩",
        "<",
        "</",
        "think",
    ),
    *(">", "|", "STOP", "tool", "`", "```", "{", '"a"', "\t", "x"),
)
TEXTS = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)
SAID = TEXTS.map(str.strip)
STOPS = st.sampled_from(("", "STOP", "x", "🦊", "ö", "\n\n", "</", "Hello"))


@cache
def vocabulary(name: str) -> Vocabulary:
    return Vocabulary(family(name).tokenizer)


def told(pieces: list[OutputPiece]) -> tuple[str, bytes]:
    """Return the content, and the bytes of the entries, each as far as they were sent."""
    content = (part.text for piece in pieces for part in piece.parts if part.channel == "content")
    octets = (entry.token_bytes for piece in pieces for entry in piece.logprobs)
    return "".join(content), b"".join(octets)


def pieces_of(
    name: str, ids: list[int], stop: str, is_raw: bool, is_whole: bool
) -> list[OutputPiece]:
    """Return what an answer of these tokens gives, piece by piece."""
    asked, words = family(name), vocabulary(name)
    splitter = None if is_raw else asked.reader.splitter(asked.is_thinking(), tools_for([CALL]))
    output = OutputProcessor(words.detokeniser(), [stop] if stop else [], splitter)
    pieces = []
    for token in ids:
        entry = TokenLogprob(token, "", words.token_bytes(token), -1.0, [])
        pieces.append(output.add(token, entry))
        if pieces[-1].stop is not None:
            return pieces
    return [*pieces, output.finish(is_complete=is_whole)]


def spelled(name: str, text: str, width: int) -> list[int]:
    """Return the tokens of `text`: as the model's tokenizer cuts it, or every `width` characters.

    Marks stay whole, as models write them.
    """
    asked, ids = family(name), list[int]()
    marks = sorted(asked.tokenizer.get_added_vocab(), key=len, reverse=True)
    while text:
        end = len(next((mark for mark in marks if text.startswith(mark)), "")) or width or len(text)
        ids += asked.tokenizer.encode(text[:end], add_special_tokens=False)
        text = text[end:]
    return ids


@pytest.mark.parametrize("name", FAMILIES)
@given(
    st.tuples(TEXTS.filter(str.strip), SAID, st.booleans()),
    STOPS,
    st.integers(0, 3),
    st.floats(0, 1),
)
@example(("Hello 🦊", "Hello 🦊 wörld", True), "", 0, 1.0)
@example(("x", "Hello\n\nxSTOPx", False), "STOP", 1, 1.0)
@settings(max_examples=40)
def test_the_entries_of_each_moment_are_the_content(
    name: str, said: tuple[str, str, bool], stop: str, width: int, share: float
) -> None:
    asked = family(name)
    thought, content, calls = said
    content = "" if calls and name == "llama3" else content  # where a call is the whole turn
    parts = AnswerParts(thought.strip() if asked.thinks else "", content, (CALL,) * calls)
    ids = spelled(name, asked.written(parts), width)
    ids = ids[: round(len(ids) * share)]
    for is_raw in (False, True):
        pieces = pieces_of(name, ids, stop, is_raw, share == 1)
        text, octets = told(pieces)
        assert octets.decode("utf-8", "ignore") == text
        assert len(octets) - len(text.encode()) <= 3, "a character at the end that is not whole"
        for count in range(len(pieces)):
            so_far, entries = told(pieces[:count])
            assert so_far.encode().startswith(entries.decode("utf-8", "ignore").encode())


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\nSo.\n{call}\u3000Done."),
        ("gemma3", "So.\n{call}\u3000Done."),
        ("glm4", "\n<think>hm</think>\n\t<think>more"),
    ],
    ids=["blank of three tokens behind a call", "the same in a fence", "blank before thinking"],
)
def test_the_entries_are_the_content_where_blanks_are_left_out_or_come_late(
    name: str, written: str
) -> None:
    call = family(name).write(AnswerParts("", "", (CALL,)))
    pieces = pieces_of(name, spelled(name, written.format(call=call), 0), "", False, False)
    text, octets = told(pieces)
    assert octets == text.encode()


class Numbers:
    """A vocabulary of numbers."""

    def token_bytes(self, token_id: int) -> bytes:
        return str(token_id).encode()


VALUES = st.sampled_from((-1.5, -1.0, -0.5, -0.0, 0.0, float("-inf"), -30.0, -1e30))


@given(st.lists(VALUES, min_size=1, max_size=60), st.integers(0, 20), st.data())
def test_the_alternatives_are_the_first_of_all_in_their_order(
    values: list[float], top: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.integers(0, len(values) - 1))
    numbers: Any = Numbers()
    entry = describe(chosen, mx.array(values), top, numbers)
    expected = sorted(range(len(values)), key=lambda at: (-np.float32(values[at]), at))[:top]
    assert [row[0] for row in entry.top] == expected
    assert [row[3] for row in entry.top] == [float(np.float32(values[at])) for at in expected]
    assert entry.logprob == float(np.float32(values[chosen]))


@pytest.mark.parametrize("top", [0, 1, 20])
def test_no_whole_vocabulary_is_sorted_for_a_token(
    top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by who is called with what, as time would tell of the machine."""
    sizes: list[int] = []

    def spied(real: Callable[..., Any], array: Any, *more: Any, **options: Any) -> Any:
        sizes.append(np.array(array).size)
        return real(array, *more, **options)

    for module, name in ((np, "argsort"), (np, "sort"), (mx, "argsort"), (mx, "sort")):
        monkeypatch.setattr(module, name, partial(spied, getattr(module, name)))
    numbers: Any = Numbers()
    describe(7, mx.array(np.linspace(-9, 0, 50_000, dtype=np.float32)), top, numbers)
    assert max(sizes, default=0) <= top
