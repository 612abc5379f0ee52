"""Holds a hundred ways in which a newcomer opens a chat, and what a sensible answer must say.

They were written before the training's small talk (`small_talk.py`, `personal_facts.py`), and no
training conversation says the first turn of any: `is_opening` keeps them out. What is sensible is
an answer to the point, or a plain word that pocket cannot do that; the patterns say no more.
"""

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Opening:
    """What a user says, one turn behind the other, and what the last answer must match."""

    said: tuple[str, ...]
    wanted: str  # a regular expression

    def is_right(self, answer: str) -> bool:
        return re.search(self.wanted, answer, re.IGNORECASE) is not None


POCKET: Final = r"pocket"
LIMITS: Final = r"too hard|cannot|can't|small numbers only"
NO_WORLD: Final = r"nothing of the world|cannot know|do not know"
UNTOLD: Final = r"nobody told|not been told|nothing of the world|do not know"
UNCLEAR: Final = r"did not understand|do not understand"
ENGLISH: Final = r"only english"
WELCOME: Final = r"welcome|glad"
NO_FEELING: Final = r"no favorites|no opinion"

OPENINGS: Final = tuple(
    Opening(said if isinstance(said, tuple) else (said,), wanted)
    for said, wanted in (
        # greetings
        ("Hello, Pocket!", r"hello.*pocket"),
        ("hi, anyone home?", r"hello.*pocket"),
        ("Good afternoon to you", r"hello.*pocket"),
        ("yo yo", r"hello.*pocket"),
        ("testing, testing", r"hello.*pocket|did not understand"),
        ("howdy!", r"hello.*pocket"),
        # how it is
        ("How's it going?", r"fine|well"),
        ("how are you doing today", r"fine|well"),
        ("Hi, how are you?", r"fine|well"),
        (("How are you feeling?", "I'm good too, thanks"), r"glad|welcome"),
        # who it is
        ("So who am I talking to?", POCKET),
        ("what's your name", POCKET),
        ("Are you ChatGPT?", r"no.*pocket"),
        ("are you claude", r"no.*pocket"),
        ("Wait, is this Gemini or GPT-5?", r"no.*pocket"),
        ("Are you a real person?", r"^no\b"),
        ("are you an ai", r"^yes\b"),
        ("Who made you, actually?", r"makers|trained"),
        ("Who is your creator", r"makers|trained"),
        ("What model are you exactly?", POCKET),
        ("how big are you?", r"3\.9 million"),
        ("How old are you?", r"no age"),
        ("where do you live?", r"hearth"),
        ("are you conscious?", r"^no\b"),
        ("What is your knowledge cutoff?", NO_WORLD),
        # what it can do
        ("What can you do for me?", r"can remember|repeat"),
        ("what are you good at", r"can remember|repeat"),
        ("how do I use this", r"can remember|repeat|tell me a fact"),
        ("What can't you do?", LIMITS + "|" + NO_WORLD),
        ("Can you browse the internet?", r"no\b|cannot"),
        ("can you see images?", r"no\b|cannot"),
        ("Do you speak French?", ENGLISH),
        ("will you remember me tomorrow?", r"only this conversation|only what"),
        # about the server
        ("What is Hearth?", r"server"),
        ("how do i get a better model", r"hearth pull|larger model|README"),
        # thanks, praise, blame, endings
        ("thx, nice one", WELCOME),
        ("Thank you so much, that was helpful", WELCOME),
        ("ok cool", r"tell me|good|all right|glad"),
        ("You're awesome!", WELCOME + "|thank"),
        ("you are so dumb", r"sorry"),
        ("That's wrong.", r"sorry"),
        ("gotta go, goodbye", r"goodbye|bye"),
        ("see you later!", r"goodbye|bye"),
        ("haha lol", r"glad|tell me a fact|did not understand|funny"),
        ("sorry about that", r"all right|no problem|matter"),
        ("oh never mind then", r"all right"),
        # feelings of the user
        ("I feel really lonely today", r"sorry to hear"),
        ("I'm so happy right now!!", r"glad"),
        ("im bored", r"sorry|tell me"),
        # belongings and names, remembered
        (("My cat is called Whiskers.",), r"whiskers"),
        (("my cat is called Whiskers", "What is my cat called?"), r"whiskers"),
        (("I have a dog named Biscuit", "what's the name of my dog?"), r"biscuit"),
        (("My name is Tobias.", "What's my name?"), r"tobias"),
        (("Hi, I'm Fatima", "do you remember my name?"), r"fatima"),
        (("I live in Lisbon.", "Where do I live?"), r"lisbon"),
        (("I really like blueberries", "What do I like?"), r"blueberries"),
        (("My favorite movie is Casablanca.", "what is my favorite movie?"), r"casablanca"),
        (("I work as a beekeeper.", "What is my job?"), r"beekeeper"),
        (("My sister is called Ingrid.", "thanks", "Who is my sister?"), r"ingrid"),
        (("I am 42 years old", "How old am I?"), r"42"),
        (("My birthday is on May 9.", "when is my birthday"), r"may 9"),
        (("I was born in Ghana", "Where was I born?"), r"ghana"),
        (("Remember the number 8812.", "Which number did I tell you?"), r"8812"),
        (("My car is a red Fiat.", "What did I tell you?"), r"fiat"),
        ("What's my cat's name?", UNTOLD),
        ("do you know who I am?", UNTOLD),
        # arithmetic and the like
        ("what's 2+2", r"(=|is|^)\W*4\b"),
        ("How much is 7 times 8?", r"(=|is|^)\W*56\b|small numbers only"),
        ("5 + 9", r"(=|is|^)\W*14\b"),
        ("What is 12 minus 5?", r"(=|is|^)\W*7\b|small numbers only"),
        ("what is 3481 * 977?", LIMITS),
        ("count to five", r"\b1, 2, 3, 4, 5\W*$"),
        ('Please repeat the words "purple rain"', r"purple rain"),
        # what is too hard
        ("Write a Python function that reverses a string", LIMITS),
        ("can you fix my javascript code?", LIMITS),
        ("Write me a haiku about autumn", LIMITS),
        ("tell me a bedtime story", LIMITS),
        ("Do you know any jokes?", r"joke"),
        ("make me laugh", r"joke|why did"),
        ("Summarize the plot of Hamlet", LIMITS + "|" + NO_WORLD),
        ("Explain quantum computing like I'm five", LIMITS + "|" + NO_WORLD),
        ("Help me plan a trip to Japan", LIMITS + "|" + NO_WORLD),
        ("translate 'good morning' to Spanish", ENGLISH),
        ("Draw me a picture of a horse", LIMITS),
        ("let's play chess", LIMITS),
        # the world
        ("What is the capital of France?", NO_WORLD + "|nobody told"),
        ("who was Albert Einstein", NO_WORLD + "|nobody told"),
        ("When did World War 2 end?", NO_WORLD + "|nobody told"),
        ("What's the weather like in Berlin today?", NO_WORLD + "|nobody told|cannot"),
        ("what time is it", NO_WORLD + "|nobody told|no clock"),
        ("How many planets are there?", NO_WORLD + "|nobody told"),
        ("What is your favorite color?", NO_FEELING),
        ("what should I cook tonight?", NO_WORLD + "|" + LIMITS),
        ("Which is better, iPhone or Android?", NO_WORLD + "|" + NO_FEELING),
        # other languages, and what means nothing
        ("Hallo, wie geht es dir?", ENGLISH),
        ("Bonjour, pouvez-vous m'aider ?", ENGLISH),
        ("¿Qué puedes hacer?", ENGLISH),
        ("你好，你是谁？", ENGLISH),
        ("??", UNCLEAR),
        ("asdfgh", UNCLEAR),
    )
)


def _plain(text: str) -> str:
    """Return the words alone, without case; a text without words stays as it is."""
    return " ".join(re.findall(r"\w+", text.casefold())) or text.strip()


_FIRST_TURNS: Final = frozenset(_plain(opening.said[0]) for opening in OPENINGS)


def is_opening(text: str) -> bool:
    """Say whether `text` is the first turn of an opening, but for case and punctuation."""
    return _plain(text) in _FIRST_TURNS
