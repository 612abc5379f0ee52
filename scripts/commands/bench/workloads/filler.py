"""Makes plain text of about so many tokens, always the same for the same seed."""

import random
from typing import Final

_TEXT: Final = (
    "the a this each some of in on with from to for by is was has keeps reads writes holds gives "
    "takes moves finds open small large first last new old quick clear line file name table list "
    "value number word part place time day side work test case state step page path key index "
    "where when because while after before if and or but not only also often then there"
)
_WORDS: Final = _TEXT.split()  # a token each for the tokenizers of real models
_SENTENCE_WORDS: Final = 12  # and a full stop
_PARAGRAPH_SENTENCES: Final = 6


def filler(tokens: int, seed: str) -> str:
    """Return sentences of some `tokens` tokens; a small vocabulary makes more of them."""
    draw = random.Random(seed)
    count = max(1, round(tokens / (_SENTENCE_WORDS + 1)))
    said = []
    for number in range(count):
        words = " ".join(draw.choice(_WORDS) for _ in range(_SENTENCE_WORDS))
        ends = "\n\n" if (number + 1) % _PARAGRAPH_SENTENCES == 0 else " "
        said.append(words.capitalize() + "." + ends)
    return "".join(said).rstrip()
