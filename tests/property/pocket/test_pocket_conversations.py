"""The conversations that pocket is trained on and examined with are sound."""

import itertools
import json
import random
import re

from hypothesis import given, settings, strategies as st

from scripts.pocket import conversation_tokens, evaluate, vocabulary
from scripts.pocket.conversations import Talk, talk

LISTED = {
    word.lower()
    for name, value in vars(vocabulary).items()
    if name.isupper() and isinstance(value, tuple)
    for word in re.findall(r"[A-Za-z]+", " ".join(value))
}
SEEDS = st.integers(0, 10**9)


def made(seed: int, tools_max: int) -> Talk:
    rng = random.Random(seed)
    return talk(rng, rng.randrange(1, 8), rng.choice((0, 0, 12)), tools_max)


@settings(max_examples=40)
@given(SEEDS, st.integers(0, 4))
def test_roles_follow_each_other_as_in_a_chat(seed: int, tools_max: int) -> None:
    turns = made(seed, tools_max).turns
    follows = {
        "system": {"user"},
        "user": {"assistant"},
        "assistant": {"user", "tool"},
        "tool": {"tool", "assistant"},
    }
    assert turns[0].role in {"system", "user"} and turns[-1].role == "assistant"
    for turn, later in itertools.pairwise(turns):
        assert later.role in follows[turn.role]
        assert (later.role == "tool") == bool(turn.calls) or turn.role == "tool"
    assert all(turn.text or turn.calls for turn in turns)


@settings(max_examples=40)
@given(SEEDS)
def test_calls_are_of_tools_that_are_offered(seed: int) -> None:
    conversation = made(seed, 4)
    offered = {tool.name: tool.schema["function"]["parameters"] for tool in conversation.tools}
    assert len(offered) == len(conversation.tools)
    for turn in conversation.turns:
        for name, arguments in turn.calls:
            assert arguments.keys() <= offered[name]["properties"].keys()
            assert set(offered[name].get("required", ())) <= arguments.keys()


@settings(max_examples=40)
@given(SEEDS)
def test_no_training_conversation_has_an_invented_word_of_the_examination(seed: int) -> None:
    text = "".join(
        piece for piece, _ in conversation_tokens.script(random.Random(seed), made(seed, 3))
    )
    names = {word.lower() for word in re.findall(r"[A-Z]?[a-z]{4,}", text)} - LISTED
    template = {"assistant", "system", "user", "functions", "signatures", "answer", "arguments"}
    held_out = {word for word in names if vocabulary.is_held_out(word)}
    assert not {word for word in held_out if is_invented(word)} - template


def is_invented(word: str) -> bool:
    """Whether `word` is made of the syllables of `words.invented`, and long enough to be one."""
    onsets, vowels = "|".join(vocabulary.ONSETS), "|".join(vocabulary.VOWELS)
    codas = "|".join(coda for coda in vocabulary.CODAS if coda)
    return bool(re.fullmatch(rf"(?:(?:{onsets})(?:{vowels})(?:{codas})?){{3}}", word))


@settings(max_examples=10)
@given(SEEDS)
def test_what_is_examined_is_told_in_the_prompt(seed: int) -> None:
    """A question that its conversation does not answer would examine luck."""
    for skill, make in evaluate.SKILLS.items():
        question = make(random.Random(seed))
        messages, offered = conversation_tokens.messages_of(question.talk)
        assert messages[-1]["role"] in {"user", "tool"}
        if skill == "right tool, right arguments":
            wanted = json.loads(question.wanted)
            assert wanted["name"] in {tool["function"]["name"] for tool in offered}
            assert question.is_right(f"<tool_call>\n{question.wanted}\n</tool_call>")
        else:
            assert any(question.wanted in message["content"] for message in messages)
            assert question.is_right(f"It is {question.wanted}.")
        assert not question.is_right("I do not know.")
