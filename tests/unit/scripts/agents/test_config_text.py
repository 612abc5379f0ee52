"""Edits of configuration texts change what they say, and leave all else as it is written."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.commands.agents import json_text
from hearth.commands.agents.config_file import edited, parsed, reverted
from hearth.commands.agents.config_values import ConfigError, Values, entries_of
from hearth.commands.agents.json_syntax import parse

FILE = Path("/home/user/settings")
COMMENT = re.compile(r"//[^\r\n]*|/\*.*?\*/", re.S)

names = st.sampled_from(["a", "b", "env", "model", "hearth", "list", "it's", 'q"uote', "ü"])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8", exclude_characters="/")),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(names, values, max_size=4)
wishes = st.fixed_dictionaries(
    {},
    optional={
        "model": st.text(max_size=5),
        "env": st.dictionaries(names, st.text(max_size=5), min_size=1, max_size=2),
        "a": st.fixed_dictionaries({"hearth": objects}),
        "list": st.tuples(st.dictionaries(names, scalars, min_size=1)).map(list),
    },
)
blanks = st.sampled_from(["", " ", "\n", "\r\n  ", "\t", " // note\n", "/* two\n lines */"])


@st.composite
def json5_texts(draw: st.DrawFn) -> str:
    """A text in anybody's manner: blanks, comments, commas before brackets, quotes."""
    return draw(blanks) + written(draw, draw(objects)) + draw(blanks)


def written(draw: st.DrawFn, value: Any) -> str:
    if not isinstance(value, dict | list):
        text = json.dumps(value)
        if "'" not in text and "\\" not in text and draw(st.booleans()):
            return re.sub('^"|"$', "'", text)
        return text
    lead = (
        [f"{json.dumps(name)}{draw(blanks)}:" for name in value] if isinstance(value, dict) else []
    )
    inner = list(value.values()) if isinstance(value, dict) else value
    parts = [
        f"{draw(blanks)}{name}{draw(blanks)}{written(draw, each)}{draw(blanks)}"
        for name, each in zip(lead or [""] * len(inner), inner, strict=True)
    ]
    text = ",".join(parts) + ("," if parts and draw(st.booleans()) else "")
    return ("{%s%s}" if isinstance(value, dict) else "[%s%s]") % (text, draw(blanks))


def merged(values: Values, wanted: Values) -> Values:
    """Say again what `entries_of` says that it does."""
    made = dict(values)
    for name, value in wanted.items():
        there = made.get(name)
        if isinstance(value, dict) and isinstance(there, dict) and name != "hearth":
            made[name] = merged(there, value)
        elif isinstance(value, list) and isinstance(there, list):
            made[name] = there if value[0] in there else [value[0], *there]
        else:
            made[name] = value
    return made


@given(json5_texts(), wishes)
def test_an_edit_of_json_says_what_was_wanted_and_keeps_every_comment(
    text: str, wanted: Values
) -> None:
    before = parsed(FILE, "json5", text)
    after, entries = edited(FILE, "json5", text, entries_of(wanted, before))
    assert parsed(FILE, "json5", after) == merged(before, wanted)
    if not any(entry.before for entry in entries):  # what is replaced may hold comments
        assert COMMENT.findall(after) == COMMENT.findall(text)
    reverse, kept = reverted(FILE, "json5", after, entries)
    assert not kept
    assert parsed(FILE, "json5", reverse) == before
    assert entries or after == text


@given(objects, wishes, st.sampled_from([None, 2, "\t"]), st.booleans())
def test_json_stays_json_in_its_own_lines(
    before: Values, wanted: Values, indent: int | str | None, is_crlf: bool
) -> None:
    text = json.dumps(before, indent=indent) + "\n"
    text = text.replace("\n", "\r\n") if is_crlf else text
    after, _ = edited(FILE, "json", text, entries_of(wanted, before))
    assert json.loads(after) == merged(before, wanted)
    assert not is_crlf or "\n" not in after.replace("\r\n", "")


@given(json5_texts(), st.dictionaries(st.sampled_from(["x", "y"]), st.integers(), min_size=1))
def test_what_a_user_adds_after_an_edit_stays_when_it_is_undone(text: str, later: Values) -> None:
    before = parsed(FILE, "json5", text)
    wanted: Values = {"new": {"deep": "1"}, "other": {"hearth": {"z": 1}}, "items": [{"id": 1}]}
    after, entries = edited(FILE, "json5", text, entries_of(wanted, before))
    for name, value in later.items():
        after = json_text.set_value(after, (name,), value)
        after = json_text.set_value(after, ("new", name), value)
    reverse, kept = reverted(FILE, "json5", after, entries)
    assert not kept
    assert parsed(FILE, "json5", reverse) == {**before, **later, "new": later}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ("// nothing\n", {}),
        ("{a: 1, $b: +2, 'c': 0x1F}", {"a": 1}),
        (
            r"{'a\'b': 'it\
s \x41\u00e9\ud83d\ude00'}",
            {"a'b": "its Aé😀"},
        ),
        ("\ufeff{null: null, true: [true,],}", {"null": None, "true": [True]}),
    ],
)
def test_json5_is_read_as_its_agents_read_it(text: str, value: Values) -> None:
    read = parse(text).value
    assert {name: read[name] for name in value} == value


@pytest.mark.parametrize(
    "text", ["[]", "1", "{", "{a}", "{a:}", "{a:1 b:2}", "{} {}", "{a:[1 2]}", "{a:" * 200]
)
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be edited"):
        parsed(FILE, "json5", text)


def test_comments_in_a_file_that_its_agent_reads_as_plain_json_are_refused() -> None:
    with pytest.raises(ConfigError, match="Mend it first"):
        parsed(FILE, "json", "{} // mine")


TOML_WANTED: Values = {
    "model": "local",
    "model_context_window": 4096,
    "model_providers": {"hearth": {"name": "H", "auth": {"command": "cat", "args": ["/a b"]}}},
}
TOML_TEXTS = {
    "empty": "",
    "top": '# mine\nmodel = "gpt"  # best\n\n[a]\nb = 1\n',
    "other providers": '[model_providers.x]\nname = "x"\n',
    "ours, by hand": "[model_providers.hearth]\nname = 'old'\n\n# tail\n[z]\nq = 1",
    "no line end": 'a = "b"',
    "CRLF": 'a = 1\r\nmodel = "m"\r\n\r\n[t]\r\nx = 1\r\n',
    "byte order mark": "\ufeffa = 1\n",
}


@pytest.mark.parametrize("text", TOML_TEXTS.values(), ids=list(TOML_TEXTS))
def test_an_edit_of_toml_says_what_was_wanted_and_is_taken_out_again(text: str) -> None:
    before = tomllib.loads(text.removeprefix("\ufeff"))
    after, entries = edited(FILE, "toml", text, entries_of(TOML_WANTED, before))
    assert parsed(FILE, "toml", after) == merged(before, TOML_WANTED)
    assert re.findall("^#.*", text, re.M) == re.findall("^#.*", after, re.M)
    assert "\r\n" not in text or "\n" not in after.replace("\r\n", "")
    reverse, kept = reverted(FILE, "toml", after + "\n[later]\nx = 1\n", entries)
    assert not kept
    assert parsed(FILE, "toml", reverse) == {**before, "later": {"x": 1}}


@pytest.mark.parametrize(
    "text",
    [
        "model_providers = {x = {}}\n",
        'model = """\na"""\n',
        'a = """\nmodel = 1\n[t]\n"""\n',
        'a."b" = 1\n[a.c]\n[model_providers]\n',
    ],
)
def test_toml_that_is_written_otherwise_is_edited_rightly_or_refused(text: str) -> None:
    before = tomllib.loads(text)
    try:
        after, _ = edited(FILE, "toml", text, entries_of(TOML_WANTED, before))
    except ConfigError as error:
        assert str(FILE) in str(error)
    else:
        assert tomllib.loads(after) == merged(before, TOML_WANTED)
