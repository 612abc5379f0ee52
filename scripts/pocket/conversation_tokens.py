"""Turns conversations into tokens by the chat template, and marks the tokens to be learned."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.pocket.conversations import Talk, Turn

VOCAB_SIZE: Final = 3_072
END: Final = "<|im_end|>"
ADDED: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    END,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
_CONTROL: Final = ADDED[:3]  # as in Qwen3 the others are whole tokens that decoding shows
# A blank is a token of its own but before these words: so a name has the same tokens in a sentence,
# behind a quote and at the beginning of a line, and copying it needs no second spelling.
_JOINED: Final = (
    "a about add after again all also am an and answer any are as at back be but by call came can "
    "code color could date days did do does done exactly failed fact file find for from functions "
    "go has have here hello how i in inside into is it know let life like list lives made me model "
    "more my name near need next no not now number of off old on one or order please question "
    "read remember said say set should small stands steps talked tell test text that the their "
    "them then they this to told tool tools under up use used user using value very want wants "
    "was we went were what when where which who will with works would years you your"
)
_PIECES: Final = (
    rf" (?:{'|'.join(_JOINED.split())})(?![\p{{L}}\p{{N}}_])"
    r"|'(?:s|t|re|ve|m|ll|d)(?!\p{L})|\p{Lu}?\p{Ll}+|\p{Lu}+(?!\p{Ll})|\p{L}|\p{N}"
    r"|\n+|[^\S\n]+|[^\s\p{L}\p{N}]+"
)
CALL_OPENING: Final = '<tool_call>\n{"name": "'


def train_tokenizer(path: Path, texts: Iterable[str]) -> None:
    """Write a byte-level BPE of VOCAB_SIZE tokens, the added ones last. Any text survives it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ADDED),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(
        [AddedToken(token, special=token in _CONTROL, normalized=False) for token in ADDED]
    )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    tokenizer.save(str(path))


# ---------------------------------------------------------------- text, and what is learned of it

Piece = tuple[str, bool]  # a text, and whether it is learned


def script(rng: random.Random, talk: Talk) -> list[Piece]:
    """Return the text of `talk` as the chat template writes it.

    Thinking is asked for in half of the conversations. Earlier answers stand as they were
    sampled or as a client sends them back: without what was thought.
    """
    is_thinking = rng.random() < 0.5
    mixed = rng.random() < 0.1
    stripped = rng.choice((0.0, 0.3, 1.0))
    pieces = [(head(talk), False)]
    last = len(talk.turns) - 1
    for index, turn in enumerate(talk.turns):
        if turn.role == "assistant":
            thinks = rng.random() < 0.5 if mixed else is_thinking
            bare = index < last and rng.random() < stripped
            pieces += _answer(turn, thinks, bare)
        elif turn.role == "tool":
            follows = talk.turns[index - 1].role == "tool"
            text = "" if follows else "<|im_start|>user"
            text += f"\n<tool_response>\n{turn.text}\n</tool_response>"
            if talk.turns[index + 1].role != "tool":
                text += f"{END}\n"
            pieces.append((text, False))
        elif turn.role == "user":
            pieces.append((f"<|im_start|>user\n{turn.text}{END}\n", False))
    return pieces


def head(talk: Talk) -> str:
    """Return the system turn: the system prompt and the tools."""
    first = talk.turns[0]
    system = first.text if first.role == "system" else ""
    if not talk.tools:
        return f"<|im_start|>system\n{system}{END}\n" if first.role == "system" else ""
    lines = [system + "\n\n"] if first.role == "system" else []
    lines.append("# Tools\n\nYou may call functions; these are their signatures:\n<tools>")
    for tool in talk.tools:
        # What a tool is for stands before its name: the name's tokens can look back at it.
        function = tool.schema["function"]
        shown = {key: function[key] for key in ("description", "name", "parameters")}
        lines.append("\n" + json.dumps(shown))
    lines.append(
        "\n</tools>\n\nFor each call answer with a JSON object in <tool_call></tool_call>:\n"
    )
    lines.append('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n')
    return "<|im_start|>system\n" + "".join(lines) + f"</tool_call>{END}\n"


def _answer(turn: Turn, thinks: bool, bare: bool) -> list[Piece]:
    opening = "<|im_start|>assistant\n"
    said = turn.text + "".join(
        ("\n" if turn.text or index else "")
        + f'{CALL_OPENING}{name}", "arguments": {json.dumps(given)}}}\n</tool_call>'
        for index, (name, given) in enumerate(turn.calls)
    )
    said += END
    if bare:  # a server never begins an answer so: how it begins is not learned
        begin = _first_token_length(said)
        return [(opening + said[:begin], False), (said[begin:], True), ("\n", False)]
    if thinks:
        return [
            (opening, False),
            (f"<think>\n{turn.thought}\n</think>\n\n{said}", True),
            ("\n", False),
        ]
    return [(opening + "<think>\n\n</think>\n\n", False), (said, True), ("\n", False)]


def _first_token_length(text: str) -> int:
    """Return how many characters hold the first token at least: a word, a mark or a number."""
    if text.startswith("<"):
        return text.index(">") + 1
    return next((index for index, char in enumerate(text) if not char.isalnum()), 1) or 1


def encoded(tokenizer: Tokenizer, pieces: list[Piece]) -> tuple[list[int], list[bool]]:
    """Return the token ids and for each whether predicting it is learned."""
    text = "".join(piece for piece, _ in pieces)
    learned = bytearray()
    for piece, is_learned in pieces:
        learned += bytes([is_learned]) * len(piece)
    coded = tokenizer.encode(text, add_special_tokens=False)
    marks = [bool(learned[begin]) for begin, _ in coded.offsets]
    return coded.ids, marks


def messages_of(talk: Talk) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the conversation as a chat template takes it: messages and tools."""
    messages: list[dict[str, Any]] = []
    for turn in talk.turns:
        row: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.calls:
            row["tool_calls"] = [
                {"type": "function", "function": {"name": name, "arguments": given}}
                for name, given in turn.calls
            ]
        messages.append(row)
    return messages, [tool.schema for tool in talk.tools]
