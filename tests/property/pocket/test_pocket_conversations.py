"""The conversations that pocket is trained on and examined with are sound."""

import itertools
import json
import random
import re

from hypothesis import given, settings, strategies as st

from scripts.pocket import conversation_tokens, evaluate, vocabulary
from scripts.pocket.arithmetic import TERM_MAX, TOO_HARD, calculation, counting
from scripts.pocket.conversations import RECAP_MAX, Talk, Turn, chat, talk
from scripts.pocket.openings import OPENINGS, is_opening
from scripts.pocket.personal_facts import personal_fact
from scripts.pocket.small_talk import KINDS, small_talk
from scripts.pocket.topics import TOPICS
from scripts.pocket.wordings import WORDINGS

LISTED = {
    word.lower()
    for name, value in vars(vocabulary).items()
    if name.isupper() and isinstance(value, tuple)
    for word in re.findall(r"[A-Za-z]+", " ".join(value))
}
SEEDS = st.integers(0, 10**9)
PLACE = re.compile(r"\{(\w+)\}")


def made(seed: int, tools_max: int) -> Talk:
    rng = random.Random(seed)
    return talk(rng, rng.randrange(1, 8), rng.choice((0, 0, 12)), tools_max)


@settings(max_examples=40)
@given(SEEDS, st.integers(0, 4))
def test_roles_follow_each_other_as_in_a_chat(seed: int, tools_max: int) -> None:
    for turns in (made(seed, tools_max).turns, chat(random.Random(seed), 3).turns):
        check_roles(turns)


def check_roles(turns: list[Turn]) -> None:
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


# ---------------------------------------------------------------- a newcomer's first chat


@settings(max_examples=200)
@given(SEEDS)
def test_no_training_conversation_says_an_opening_of_the_examination(seed: int) -> None:
    for conversation in (chat(random.Random(seed), 6), made(seed, 2)):
        said = [turn.text for turn in conversation.turns if turn.role == "user"]
        assert [text for text in said if is_opening(text)] == []


def test_an_opening_is_known_whatever_its_case_and_punctuation() -> None:
    assert is_opening("ARE YOU CHATGPT") and is_opening("are you, ChatGPT?!")
    assert not is_opening("Are you ChatGPT or not?")
    assert not is_opening("!") and is_opening("??")


def test_a_hundred_openings_differ_and_want_something() -> None:
    assert len({opening.said for opening in OPENINGS}) == 100
    nothing = ("", "Nobody.", "I will remember: hi is home is home is home is home is home")
    assert [each.said for each in OPENINGS if any(map(each.is_right, nothing))] == []


@settings(max_examples=200)
@given(SEEDS)
def test_what_is_calculated_is_right(seed: int) -> None:
    said, answer, _ = calculation(random.Random(seed))
    numbers = [int(number) for number in re.findall(r"\d+", said)]
    is_sum = re.search(r"\+|plus|and", said) is not None
    if is_sum and max(numbers) <= TERM_MAX:
        assert answer == f"{numbers[0]} + {numbers[1]} = {sum(numbers)}"
    else:
        assert answer == TOO_HARD


@settings(max_examples=100)
@given(SEEDS)
def test_counting_leaves_no_number_out(seed: int) -> None:
    said, answer, _ = counting(random.Random(seed))
    numbers = [int(number) for number in answer.split(", ")]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1
    assert set(map(int, re.findall(r"\d+", said))) <= {numbers[0], numbers[-1]}


@settings(max_examples=200)
@given(SEEDS)
def test_what_people_tell_of_themselves_stands_in_its_answer(seed: int) -> None:
    one = personal_fact(random.Random(seed))
    assert one.value in one.statement and one.value in one.answer
    assert one.value not in one.question, "or the question answers itself"
    assert not re.search(r"[{}]", one.statement + one.question + one.answer)
    assert re.match(r"(You|Your|The) ", one.answer)


@settings(max_examples=100)
@given(SEEDS)
def test_a_recap_says_what_was_told_and_nothing_else(seed: int) -> None:
    """What was corrected is left out: a recap may be shorter than what was told."""
    told: list[str] = []
    for turn in chat(random.Random(seed), 6).turns:
        if turn.text.startswith("You told me: "):
            recap = turn.text.removeprefix("You told me: ")
            said = [one for one in told if one in recap]
            assert 0 < len(set(said)) <= RECAP_MAX
            assert not re.sub(
                "|".join(map(re.escape, sorted(said, key=len)[::-1])), "", recap
            ).strip()
            continue
        if turn.text == "Nobody told me anything yet.":
            assert not told
        told += re.findall(r"I will remember: (.*)", turn.text)
        told += re.findall(r"I was told: (.*)", turn.thought)


@settings(max_examples=200)
@given(SEEDS)
def test_small_talk_is_filled_and_answered(seed: int) -> None:
    said, answer, thought = small_talk(random.Random(seed))
    assert said and (answer, thought) in {(kind.answer, kind.thought) for kind in KINDS}
    assert not re.search(r"\{\w+\}", said)


def test_every_wording_is_of_a_kind_and_every_place_has_words() -> None:
    assert WORDINGS.keys() == {kind.name for kind in KINDS} - {"foreign"}
    places = {
        place for texts in WORDINGS.values() for text in texts for place in PLACE.findall(text)
    }
    assert places - TOPICS.keys() <= {"thing", "animal", "food"}
    assert TOPICS.keys() <= places
