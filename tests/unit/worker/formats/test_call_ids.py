"""The id that a model writes in its call reaches the client, and comes back into the prompt."""

from functools import cache

import pytest

from hearth.shared.our_ids import call_id_for, is_our_call_id, new_id
from hearth.worker.prompt.prompt_with_sampled_turns import PromptContent
from hearth.worker.stream.answer_parts import AnswerPart
from tests.helpers.families.family_cases import TOOLS, written_family
from tests.helpers.families.family_checks import FamilyChecks

KIMI, MISTRAL = "kimi_k2_thinking", "mistral_small31"
WRITTEN = {
    KIMI: ["functions.get_weather:0", "functions.get_weather:1"],
    MISTRAL: ["a1B2c3D4e", "f5G6h7J8k"],
}


@cache
def checks(name: str) -> FamilyChecks:
    return FamilyChecks(written_family(name))


def parts_of(name: str, pieces: list[str], *, is_complete: bool = True) -> list[AnswerPart]:
    splitter = checks(name).format.splitter(False, TOOLS, may_think=False)
    parts = [part for piece in pieces for part in splitter.feed(piece)]
    return [*parts, *splitter.finish(is_complete)]


def prompt_of(name: str, *ids: str) -> str:
    """Return the prompt of one call and result behind the other, with these ids."""
    messages = [{"role": "user", "content": "Go"}]
    for call_id in ids:
        call = {"id": call_id, "type": "function"}
        call["function"] = {"name": "get_weather", "arguments": {"city": "Oslo"}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": "Sunny."})
    built = checks(name).builder.build(PromptContent(messages, TOOLS))
    return str(checks(name).tokenizer.decode(built.ids))


@pytest.mark.parametrize("name", WRITTEN)
def test_an_id_is_known_as_its_call_begins_however_the_text_is_cut(name: str) -> None:
    text = written_family(name).cases["two"].text
    for pieces in ([text], list(text)):
        assert [part.call_id for part in parts_of(name, pieces) if part.name] == WRITTEN[name]


def test_a_call_that_is_cut_off_in_front_of_its_id_is_told() -> None:
    text = written_family(MISTRAL).cases["call"].text
    for end in ('"Oslo"', "3}", '"id'):
        cut = text[: text.index(end) + len(end)]
        parts = parts_of(MISTRAL, list(cut), is_complete=False)
        assert {part.channel for part in parts} == {"tool_call"} and parts[0].name == "get_weather"


@pytest.mark.parametrize(("name", "ids"), WRITTEN.items())
def test_what_a_client_is_given_comes_back_as_the_model_wrote_it(name: str, ids: list[str]) -> None:
    known: list[str] = []
    for written in (*ids, *ids):  # it begins its numbers anew
        known.append(call_id_for(written, "get_weather", known, new_id()))
        assert is_our_call_id(known[-1]) and len(known[-1]) <= 40
    assert len({*known}) == 4
    assert [given in WRITTEN[name] for given in known] == [name == MISTRAL] * 2 + [False] * 2
    for given, written in zip(known, (*ids, *ids), strict=True):
        assert prompt_of(name, given).count(written) == 2


def test_what_another_server_made_becomes_an_id_of_the_familys() -> None:
    foreign = prompt_of(KIMI, "toolu_01A", "functions.get_weather:7", "call_b")
    for number in (0, 7, 2):
        assert foreign.count(f"functions.get_weather:{number}") == 2
    assert call_id_for("call:0!", "get_weather", (), "new") == "new"
