"""Makes what people tell of themselves ("My cat is called Milo."), and the questions for it."""

import random
from typing import Final

from scripts.pocket import vocabulary as words
from scripts.pocket.facts import Fact
from scripts.pocket.openings import is_opening
from scripts.pocket.vocabulary import invented

_PETS: Final = (
    "cat", "dog", "hamster", "rabbit", "parrot", "horse", "goldfish", "turtle", "kitten", "puppy",
    "bird", "guinea pig", "pony", "snake", "fish", "boat", "robot", "car", "company", "project",
)  # fmt: skip
_RELATIVES: Final = (
    "sister", "brother", "mother", "father", "wife", "husband", "son", "daughter", "friend",
    "best friend", "boss", "neighbor", "teacher", "cousin", "uncle", "aunt", "grandmother", "mom",
    "dad", "partner", "girlfriend", "boyfriend", "colleague", "manager", "doctor", "baby",
)  # fmt: skip
_FAVORITES: Final = (
    "color", "food", "animal", "city", "book", "movie", "song", "band", "game", "drink", "number",
    "season", "sport", "flower", "day", "fruit", "dish", "language", "place", "hobby", "month",
)  # fmt: skip
_HOBBIES: Final = (
    "hiking", "music", "football", "chess", "reading", "dancing", "long walks", "old movies",
    "jazz", "cooking", "coffee", "tea", "winter", "the sea", "the mountains", "my garden", "rain",
    "trains", "science", "painting", "singing", "sailing", "swimming", "tennis", "cars", "summer",
)  # fmt: skip
_INSTRUMENTS: Final = (
    "the piano", "the guitar", "the violin", "the drums", "the flute", "tennis", "chess",
    "football", "basketball", "golf", "hockey", "the trumpet", "video games", "cards",
)  # fmt: skip
_LANGUAGES: Final = (
    "German", "Spanish", "Italian", "Dutch", "Polish", "Russian", "Chinese", "Japanese", "Greek",
    "Turkish", "Arabic", "Swedish", "Danish", "Hindi", "Portuguese", "Korean", "English", "Czech",
)  # fmt: skip
_BELONGINGS: Final = (
    "car", "bike", "bicycle", "house", "phone", "laptop", "computer", "boat", "guitar", "jacket",
    "bag", "watch", "camera", "dress", "hat", "truck", "coat", "desk", "garden", "apartment",
)  # fmt: skip
_COUNTRIES: Final = (
    "Kenya", "Brazil", "Canada", "Italy", "Spain", "Poland", "India", "Peru", "Norway", "Greece",
    "Turkey", "Egypt", "Chile", "Mexico", "Sweden", "Ireland", "Scotland", "Vietnam", "Nigeria",
)  # fmt: skip
_DEEDS: Final = (
    ("bought a {v}", "buy"), ("lost a {v}", "lose"), ("found a {v}", "find"),
    ("painted a {v}", "paint"), ("sold a {v}", "sell"), ("saw a {v}", "see"),
    ("repaired a {v}", "repair"), ("made a {v}", "make"), ("need a {v}", "need"),
    ("want a {v}", "want"), ("built a {v}", "build"), ("broke a {v}", "break"),
)  # fmt: skip

# What is said, what is asked, what is answered. {k} is a kind of thing, {v} the value.
_Row = tuple[tuple[str, ...], tuple[str, ...], str]
_NAMED: Final[_Row] = (
    (
        "My {k} is called {v}.", "My {k} is called {v}.", "My {k} is named {v}.", "my {k} is {v}",
        "My {k}'s name is {v}.", "The name of my {k} is {v}.", "I have a {k} called {v}.",
        "I have a {k} named {v}.", "I have a {k}. The name is {v}.", "We have a {k} called {v}.",
        "{v} is my {k}.", "I've got a {k} named {v}", "We call our {k} {v}.",
        "I have a {k} and it is called {v}.", "this is my {k} {v}", "My {k}, {v}, is here.",
    ),
    (
        "What is my {k} called?", "What is my {k}'s name?", "What's the name of my {k}?",
        "What is the name of my {k}?", "Who is my {k}?", "What is my {k} named?",
        "Do you remember my {k}'s name?", "How is my {k} called?", "What's my {k}'s name?",
        "Do you know the name of my {k}?", "What did I call my {k}?", "what was my {k} called",
        "Can you tell me the name of my {k}?", "And my {k}?", "What is my {k}?",
    ),
    "Your {k} is called {v}.",
)  # fmt: skip
_NAME: Final[_Row] = (
    (
        "My name is {v}.", "I am {v}.", "I'm {v}.", "Call me {v}.", "You can call me {v}.",
        "Hello, I'm {v}!", "Hello, my name is {v}.", "This is {v}.", "{v} here.", "Hi, I am {v}",
        "Hey, {v} here!", "Hi there, I'm {v}.", "my name's {v}", "People call me {v}.",
        "Hi! My name is {v}.", "Good morning, I'm {v}.", "I am called {v}.", "hey im {v}",
    ),
    (
        "What is my name?", "Who am I?", "Do you remember my name?", "Do you know my name?",
        "What am I called?", "What's my name?", "What was my name again?", "Say my name.",
        "Can you tell me my name?", "So what is my name?", "Tell me who I am.", "my name?",
        "Do you still know my name?", "Do you remember who I am?", "How am I called?",
    ),
    "Your name is {v}.",
)  # fmt: skip
_ROWS: Final[tuple[tuple[_Row, tuple[str, ...], tuple[str, ...]], ...]] = (
    (_NAMED, _PETS, ()),
    (_NAMED, _RELATIVES, ()),
    (
        (
            ("I live in {v}.", "My home is in {v}.", "I moved to {v}.", "I am living in {v}.",
             "I'm in {v}.", "We live in {v}.", "I live in {v} now.", "I have a flat in {v}."),
            ("Where do I live?", "In which city do I live?", "Where is my home?",
             "Which city do I live in?", "Do you know where I live?", "Where am I living?"),
            "You live in {v}.",
        ),
        (),
        (*words.CITIES, *_COUNTRIES),
    ),
    (
        (
            ("I am from {v}.", "I come from {v}.", "I'm from {v}.", "My hometown is {v}.",
             "We are from {v}.", "I am originally from {v}."),
            ("Where am I from?", "Where do I come from?", "Which place am I from?",
             "Do you remember where I am from?", "What is my hometown?"),
            "You are from {v}.",
        ),
        (),
        (*words.CITIES, *_COUNTRIES),
    ),
    (
        (
            ("I was born in {v}.", "My place of birth is {v}.", "I was born in {v} you know."),
            ("Where was I born?", "In which place was I born?", "Do you know where I was born?"),
            "You were born in {v}.",
        ),
        (),
        (*words.CITIES, *_COUNTRIES),
    ),
    (
        (
            ("I work as a {v}.", "I am a {v}.", "I'm a {v}.", "I am a {v} by profession.",
             "I work as a {v} here.", "My work is being a {v}."),
            ("What is my job?", "What do I do?", "What do I work as?", "What's my job?",
             "What is my profession?", "Do you know what I do for a living?", "What am I?"),
            "You work as a {v}.",
        ),
        (),
        words.JOBS,
    ),
    (
        (
            ("I like {v}.", "I love {v}.", "I really like {v}.", "I enjoy {v}.", "I like {v} a lot",
             "I am a fan of {v}.", "I love {v} so much!", "i like {v}", "We like {v}."),
            ("What do I like?", "What do I love?", "Do you know what I like?", "What do I enjoy?",
             "Tell me what I like.", "What is it that I like?"),
            "You like {v}.",
        ),
        (),
        (*words.FOODS, *_HOBBIES),
    ),
    (
        (
            ("I hate {v}.", "I do not like {v}.", "I don't like {v}.", "I can't stand {v}."),
            ("What do I not like?", "What don't I like?", "What do I hate?", "What do I dislike?"),
            "You do not like {v}.",
        ),
        (),
        (*words.FOODS, *_HOBBIES),
    ),
    (
        (
            ("I am {v} years old.", "I'm {v} years old.", "My age is {v}.", "I turned {v}.",
             "I am {v}.", "I'm {v} now."),
            ("How old am I?", "What is my age?", "What's my age?", "Do you know how old I am?"),
            "You are {v} years old.",
        ),
        (),
        tuple(str(number) for number in range(4, 99) if number != 42),
    ),
    (
        (
            ("My birthday is on {v}.", "My birthday is {v}.", "I have my birthday on {v}.",
             "I was born on {v}.", "My birthday's {v}"),
            ("When is my birthday?", "When was I born?", "What is my birthday?",
             "Which day is my birthday?", "When's my birthday?", "On which day is my birthday?"),
            "Your birthday is on {v}.",
        ),
        (),
        tuple(f"{month} {day}" for month in words.MONTHS for day in range(1, 29)),
    ),
    (
        (
            ("I have a {v}.", "I own a {v}.", "I've got a {v}.", "We have a {v} at home.",
             "My pet is a {v}.", "I keep a {v}."),
            ("Which animal do I have?", "What pet do I have?", "Do I have a pet?",
             "Which pet do I have?", "What animal do I own?"),
            "You have a {v}.",
        ),
        (),
        words.ANIMALS,
    ),
    (
        (
            ("My favorite {k} is {v}.", "My favourite {k} is {v}.", "{v} is my favorite {k}.",
             "My most loved {k} is {v}.", "The {k} I like most is {v}."),
            ("What is my favorite {k}?", "What's my favorite {k}?", "Which {k} do I like most?",
             "Do you know my favorite {k}?", "What is my favourite {k}?"),
            "Your favorite {k} is {v}.",
        ),
        _FAVORITES,
        (),
    ),
    (
        (
            ("My {k} is a {c} {v}.", "I have a {k}, a {c} {v}.", "I bought a {k}: a {c} {v}."),
            ("What is my {k}?", "What kind of {k} do I have?", "Which {k} do I have?",
             "What {k} do I have?", "What did I say about my {k}?"),
            "Your {k} is a {c} {v}.",
        ),
        _BELONGINGS,
        (),
    ),
    (
        (
            ("My {k} is {c}.", "I have a {c} {k}.", "The color of my {k} is {c}.",
             "I bought a {c} {k}."),
            ("Which color is my {k}?", "What color is my {k}?", "What is the color of my {k}?",
             "Which color does my {k} have?", "How does my {k} look?"),
            "Your {k} is {c}.",
        ),
        _BELONGINGS,
        (),
    ),
    (
        (
            ("I speak {v}.", "I speak {v} at home.", "My mother tongue is {v}.", "I can speak {v}.",
             "I am learning {v}."),
            ("Which language do I speak?", "What do I speak?", "What language do I speak?"),
            "You speak {v}.",
        ),
        (),
        _LANGUAGES,
    ),
    (
        (
            ("I play {v}.", "I often play {v}.", "I like to play {v}.", "I play {v} every week."),
            ("What do I play?", "Do you know what I play?", "What is it that I play?"),
            "You play {v}.",
        ),
        (),
        _INSTRUMENTS,
    ),
    (
        (
            ("I am going to {v} {k}.", "I will travel to {v} {k}.", "I'm off to {v} {k}.",
             "{k} I go to {v}.", "I fly to {v} {k}."),
            ("Where am I going?", "Where do I go?", "Where will I travel?", "Where am I off to?"),
            "You are going to {v} {k}.",
        ),
        ("tomorrow", "today", "next week", "in May", "on Friday", "next month", "soon"),
        words.CITIES,
    ),
    (
        (
            ("I have {v} {k}.", "We have {v} {k}.", "I've got {v} {k}."),
            ("How many {k} do I have?", "Do you know how many {k} I have?"),
            "You have {v} {k}.",
        ),
        ("children", "kids", "cats", "dogs", "brothers", "sisters", "cars", "books", "friends"),
        (*(str(number) for number in range(2, 12)), "two", "three", "four", "five", "six"),
    ),
    (
        (
            ("My {k} is at {v}.", "I have a {k} at {v}.", "My {k} starts at {v}."),
            ("When is my {k}?", "At what time is my {k}?", "What time is my {k}?",
             "When does my {k} start?"),
            "Your {k} is at {v}.",
        ),
        ("meeting", "flight", "train", "class", "appointment", "interview", "lunch", "exam"),
        tuple(f"{hour}:{minute:02}" for hour in range(6, 22) for minute in range(0, 60, 5)),
    ),
    (
        (
            ("Remember the {k} {v}.", "Please remember the {k} {v}.", "The {k} is {v}.",
             "Keep the {k} {v} in mind.", "the secret {k} is {v}", "Don't forget the {k} {v}.",
             "Remember this {k}: {v}", "Memorize the {k} {v}."),
            ("Which {k} did I tell you?", "What was the {k}?", "What is the {k}?",
             "What {k} did I tell you?", "Do you remember the {k}?", "Tell me the {k}.",
             "What's the secret {k}?", "What {k} should you remember?"),
            "The {k} is {v}.",
        ),
        ("number", "word", "code", "name", "password", "pin"),
        (),
    ),
)  # fmt: skip


def personal_fact(rng: random.Random) -> Fact:
    """Return what somebody may tell of himself in a first chat, in words of no opening."""
    while True:
        one = _personal_fact(rng)
        is_told = one.value not in one.question
        if is_told and not is_opening(one.statement) and not is_opening(one.question):
            return one


def _personal_fact(rng: random.Random) -> Fact:
    draw = rng.random()
    if draw < 0.14:
        return _filled(rng, _NAME, "my name", "", _a_name(rng))
    if draw < 0.34:
        kind = rng.choice(rng.choice((_PETS, _RELATIVES)))
        return _filled(rng, _NAMED, f"my {kind}", kind, _a_name(rng))
    if draw < 0.42:
        return _deed(rng)
    row, kinds, values = rng.choice(_ROWS[2:])
    kind = rng.choice(kinds) if kinds else ""
    it = rng.choice(values) if values and rng.random() < 0.7 else ""
    if not it:
        it = _another(rng, row, kind)
    return _filled(rng, row, f"{row[2]} {kind}", kind, it)


def _filled(rng: random.Random, row: _Row, key: str, kind: str, it: str) -> Fact:
    said, asked, answer = row
    color = rng.choice(words.COLORS)
    parts = {"k": kind, "v": it, "c": color}
    statement = rng.choice(said)
    if rng.random() < 0.25:
        statement = _careless(statement)
    question = rng.choice(asked)
    if rng.random() < 0.25:
        question = _careless(question)
    texts = [text.format(**parts) for text in (statement, question, answer)]
    if rng.random() < 0.6 and not texts[0].startswith(it):
        texts[0] = texts[0][0].upper() + texts[0][1:]
    return Fact(key, it if "{v}" in answer else color, *texts)


def _careless(text: str) -> str:
    """Return the text as it is typed in haste: small letters, no mark at its end."""
    return text.lower().rstrip(".?!")


def _a_name(rng: random.Random) -> str:
    if rng.random() < 0.35:
        return rng.choice(words.FIRST_NAMES)
    name = invented(rng)
    return name if rng.random() < 0.1 else name.capitalize()


def _another(rng: random.Random, row: _Row, kind: str) -> str:
    """Return a value that no list holds: numbers where numbers stand, else an invented word."""
    if row[2].startswith(("You are {v} years", "Your {k} is at", "You have {v} {k}")):
        return str(rng.randrange(2, 99))
    if kind in ("number", "code", "pin", "password"):
        return str(rng.randrange(10 ** rng.choice((2, 3, 4, 4, 5))))
    name = invented(rng) if rng.random() < 0.7 else rng.choice(words.NOUNS)
    is_name = row[2].startswith(("You live", "You are from", "You were", "You are going"))
    return name.capitalize() if is_name or rng.random() < 0.4 else name


def _deed(rng: random.Random) -> Fact:
    told, verb = rng.choice(_DEEDS)
    thing = rng.choice((rng.choice(words.NOUNS), f"{rng.choice(words.COLORS)} {invented(rng)}"))
    when = rng.choice(("", "", " yesterday", " today", " last week"))
    said = told.format(v=thing) + when
    row: _Row = (
        (f"I {said}.", f"Today I {said}.", f"i {said}", f"We {said}."),
        (f"What did I {verb}?", "What did I do?", "What did I say?", f"Do you know what I {verb}?"),
        f"You {said}.",
    )
    fact = _filled(rng, row, f"I {verb}", "", thing)
    return Fact(fact.key, thing, fact.statement, fact.question, f"You {said}.")
