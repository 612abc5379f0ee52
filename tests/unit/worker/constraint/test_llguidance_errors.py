"""Each limit of llguidance has a sentence that whoever wrote a schema can act on."""

import pytest

from hearth.worker.constraint.grammar_trial import GrammarError, explained, meaning_of

SAID = {
    "Parser Error: Current row has 3599 items; max is 2000; consider making your grammar "
    "left-recursive if it's right-recursive": "fewer optional properties",
    "Too many items (limit 50000; try avoiding single-byte/short lexemes)": "optional properties",
    "lexer error: too many expressions constructed": "patterns repeat less",
    "too many states: 50001": "patterns repeat less",
    "fuel exhausted when checking relevance of lexemes (1000000)": "smaller multipleOf",
    "initial lexer configuration (grammar) too big (limit for this grammar: 1)": "fewer properties",
    "a token of it takes more than 0.5 s of CPU time": "patterns that repeat less",
    "schema too large": "fewer properties",
    "NoExtensionBias": "$ref to itself",
}


@pytest.mark.parametrize("said", SAID)
def test_a_limit_is_explained_with_its_remedy_and_its_own_words(said: str) -> None:
    text = explained(GrammarError(said))
    assert SAID[said] in text
    assert said.partition(";")[0].removesuffix(")") in text
    assert "left-recursive" not in text
    assert not text.endswith((".", " "))


def test_only_a_schema_that_is_too_large_passes_a_limit() -> None:
    assert {said for said in SAID if not meaning_of(said).is_limit} == {"NoExtensionBias"}
    assert not meaning_of("token 5 does not satisfy the grammar").is_limit


def test_words_that_say_what_is_wrong_stay_as_they_are() -> None:
    assert explained(GrammarError("Unknown format: colour")) == "Unknown format: colour"
