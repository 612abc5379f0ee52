"""Settings that users wrote are read with their comments, and what is none is named."""

import pytest

from hearth.commands.agents.user_config import json_in
from hearth.shared.errors import StartError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        ("\ufeff // nothing yet\n", {}),
        (
            '{"a": [1, 2, ], /* two\nlines */ "b": {"c": null,}, // more\n}',
            {"a": [1, 2], "b": {"c": None}},
        ),
        (
            '{"url": "http://x/*y*/", "text": "a \\" // b,}"}',
            {"url": "http://x/*y*/", "text": 'a " // b,}'},
        ),
    ],
)
def test_comments_and_last_commas_are_left_out_and_strings_stay(
    text: str, values: dict[str, object]
) -> None:
    assert json_in(text, "x") == values


@pytest.mark.parametrize("text", ["[]", "{", "{a: 1}", "[" * 100_000])
def test_what_is_no_object_is_named(text: str) -> None:
    with pytest.raises(StartError, match=r"^\$X (is no JSON object|cannot be read: .*)\. Mend it"):
        json_in(text, "$X")
