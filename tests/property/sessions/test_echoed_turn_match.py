"""Every composition of clients' rewrites says the same; one change of meaning never does."""

import copy
import json
from typing import Any

from hypothesis import given, strategies as st

from hearth.worker.sessions.echoed_turn_match import (
    _BLANK,
    SessionFacts,
    TurnContent,
    changes,
    says_the_same,
    turn_content,
    working_directory,
)

HOME = "/home/dev/my kit"
KNOWN = SessionFacts(
    {
        "Read": {
            "properties": {
                "offset": {"type": "integer"},
                "ratio": {"type": ["number", "null"]},
                "flag": {"type": "boolean"},
            }
        },
        "Edit": {"properties": {"replace_all": {"type": "boolean", "default": False}}},
    },
    "claude-code",
    HOME,
)
NOTHING = SessionFacts({})
BLANK = st.text(alphabet=" \n\t\r\u00a0\u2028\ufeff", max_size=3)
TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=12)
ODD_TEXT = st.text(alphabet=st.characters(), max_size=8)  # lone surrogates too
WORDS = st.lists(
    st.sampled_from(("ab", "c", "é✓", " ", "\n\n", "<think>", "</think>")), max_size=6
).map("".join)


def nested(scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=8,
    )


NAMES = st.sampled_from(("Read", "Edit", "Bash", "f"))
ODD_JSON = nested(
    st.none() | st.booleans() | st.integers() | st.floats() | ODD_TEXT | st.just(10**400)
)


@given(
    st.builds(TurnContent, ODD_TEXT, ODD_TEXT, st.lists(st.tuples(ODD_TEXT, ODD_JSON)).map(tuple))
)
def test_what_was_said_says_the_same_as_itself(said: TurnContent) -> None:
    assert changes(said, said, NOTHING) == []
    assert changes(said, copy.deepcopy(said), KNOWN) == []


# ---------------------------------------------------------------- what clients do


def as_printed(value: Any) -> Any:
    """`value` after JavaScript's JSON.parse and JSON.stringify, for |numbers| below 2^53."""
    if isinstance(value, dict):
        return {key: as_printed(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [as_printed(each) for each in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return int(value)
    return value


SMALL = st.integers(-(2**53), 2**53) | st.floats(-(2.0**53), 2.0**53, allow_nan=False)
LARGE = st.floats(min_value=1e21, allow_infinity=False)
PLAIN = nested(st.none() | st.booleans() | SMALL | LARGE | TEXT)


@st.composite
def rewritten_call(draw: st.DrawFn) -> tuple[tuple[str, Any], tuple[str, Any]]:
    """A call as the model made it, and as a client sends it back."""
    name = draw(NAMES)
    ours: dict[str, Any] = draw(st.dictionaries(TEXT.map(lambda key: "k" + key), PLAIN, max_size=3))
    theirs = as_printed(copy.deepcopy(ours)) if draw(st.booleans()) else copy.deepcopy(ours)
    if name == "Edit" and draw(st.booleans()):
        theirs = {"replace_all": False} | theirs
    if name == "Bash":
        command = draw(TEXT.filter(str.strip))
        where = draw(st.sampled_from((f'"{HOME}"', f"'{HOME}'")))
        stripped = draw(st.booleans())
        ours["command"] = f"cd {where} && {command}"
        theirs["command"] = command if stripped else ours["command"]
    if name == "Read":
        key, typed = draw(
            st.tuples(st.just("offset"), st.integers(-99, 9999))
            | st.tuples(st.just("ratio"), st.sampled_from((0.5, -2.25, 3, 1e-05 + 1)))
            | st.tuples(st.just("flag"), st.booleans())
        )
        ours[key] = json.dumps(typed)
        theirs[key] = typed if draw(st.booleans()) else ours[key]
    return (name, ours), (name, theirs)


@st.composite
def rewritten_words(draw: st.DrawFn) -> tuple[dict[str, str], dict[str, str]]:
    """Thinking and content as the model wrote them, and as a client sends them back."""
    reasoning = draw(WORDS).replace("<think>", "").replace("</think>", "").strip(_BLANK)
    content = draw(TEXT.filter(lambda text: "<think>" not in text)).strip(_BLANK)
    lines, blank = st.sampled_from(("", "\n", "\n\n")), draw(BLANK)
    kind = draw(st.sampled_from(("kept", "stripped", "moved") if reasoning else ("kept",)))
    ours = {
        "reasoning_content": draw(BLANK) + reasoning + draw(BLANK),
        "content": (draw(lines) if content else "") + content + blank,
    }
    block = f"<think>{draw(lines)}{reasoning}{draw(lines)}</think>" if kind == "moved" else ""
    given = content if draw(st.booleans()) else ours["content"]
    if block:
        given = content  # what stood around it is how a block is written
        ours["reasoning_content"] = reasoning
    theirs = {"content": block + (draw(lines) if block else "") + given}
    if kind == "kept":
        theirs["reasoning_content"] = _of_indent(ours["reasoning_content"], reasoning)
    return ours, theirs


def _of_indent(text: str, trimmed: str) -> str:
    """Return `text` without the blank lines before it and the white space behind it."""
    if not trimmed:
        return ""
    return text[text.rfind("\n", 0, text.index(trimmed)) + 1 :].rstrip(_BLANK)


def message(words: dict[str, str], calls: list[tuple[str, Any]]) -> dict[str, Any]:
    rows = [
        {"id": str(number), "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", **words, "tool_calls": rows}


@given(rewritten_words(), st.lists(rewritten_call(), max_size=3), st.data())
def test_any_composition_of_what_clients_do_says_the_same(
    words: tuple[dict[str, str], dict[str, str]], calls: list[Any], data: Any
) -> None:
    sent_back = []
    for _, (name, arguments) in calls:
        is_text, is_ascii = data.draw(st.booleans()), data.draw(st.booleans())
        spaces = data.draw(st.sampled_from(((",", ":"), (", ", ": "), (" ,\n", "\t:"))))
        text = json.dumps(arguments, ensure_ascii=is_ascii, separators=spaces)
        sent_back.append((name, text if is_text else arguments))
    record = turn_content(message(words[0], [ours for ours, _ in calls]))
    echo = turn_content(message(words[1], sent_back))
    assert says_the_same(record, echo, KNOWN)


@given(st.integers(-(10**25), 10**25) | st.floats(allow_nan=False, allow_infinity=False))
def test_the_digits_that_javascript_prints_say_the_same_where_they_lose_none(number: float) -> None:
    double = float(number)
    mantissa, _, exponent = repr(double).partition("e")
    whole, _, fraction = mantissa.partition(".")
    if abs(double) < 1e21 and double.is_integer() and exponent:
        printed: Any = int((whole + fraction).ljust(int(exponent) + len(whole), "0"))
    elif abs(double) < 1e21 and double.is_integer():
        printed = int(whole)
    else:
        printed = double
    record, echo = (
        TurnContent("", "", (("f", {"n": number}),)),
        TurnContent("", "", (("f", {"n": printed}),)),
    )
    assert says_the_same(record, echo, NOTHING) is (number == printed)


# ---------------------------------------------------------------- whatever comes


@given(ODD_TEXT | ODD_JSON.map(json.dumps) | st.just("[" * 50_000) | st.just('{"a":' * 50_000))
def test_any_argument_text_is_read_or_stays_text(text: str) -> None:
    said = turn_content(message({"content": ""}, [("f", text)]))
    ((_, arguments),) = said.calls
    assert type(arguments) is dict or arguments == text
    assert changes(said, turn_content(message({"content": ""}, [("f", text)])), NOTHING) == []


@given(ODD_JSON, ODD_JSON, ODD_JSON, st.text(max_size=5))
def test_no_json_makes_it_raise(ours: Any, theirs: Any, schema: Any, name: str) -> None:
    known = SessionFacts({name: schema, "f": {"properties": schema}}, "claude-code", HOME)
    keys = ("command", "offset", "replace_all")
    for called in (name, "f", "Edit"):
        plain = TurnContent("", "", ((called, ours),)), TurnContent("", "", ((called, theirs),))
        inside = [
            TurnContent("", "", ((called, dict.fromkeys(keys, value)),)) for value in (ours, theirs)
        ]
        assert says_the_same(*plain, known) in (True, False)
        assert says_the_same(*inside, known) in (True, False)


@given(st.lists(st.builds(dict, role=st.sampled_from(("system", "user")), content=ODD_TEXT)))
def test_no_text_makes_the_search_for_directories_raise(messages: list[dict[str, Any]]) -> None:
    assert isinstance(working_directory(messages), str)
