"""JSON as models write it, and what it is taken for."""

import json

import pytest

from hearth.worker.stream.tool_calls.lenient_json import Transcoder
from tests.helpers.worker.transcoded_json import transcoded


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("{'a': 'b', \"c\": 'it''s'}", '{"a": "b", "c": "it\'\'s"}'),
        ("{'a': True, 'b': False, 'c': None}", '{"a": true, "b": false, "c": null}'),
        ('{a: 1, b_2: "x", $c: [2]}', '{"a": 1, "b_2": "x", "$c": [2]}'),
        ('{"a": 1, "b": [1, 2,], }', '{"a": 1, "b": [1, 2]}'),
        ('{"a": 1,, "b": 2}', '{"a": 1, "b": 2}'),
        ('{"a": "x"\n "b": 2}', '{"a": "x", "b": 2}'),
        ('{"a": "one\ntwo\tthree\x00"}', '{"a": "one\\ntwo\\tthree\\u0000"}'),
        ('{"a": "\\d+\\.\\w"}', '{"a": "\\\\d+\\\\.\\\\w"}'),
        ('{"a": "\\u12 \\x41 \\\'"}', '{"a": "\\\\u12 \\\\x41 \'"}'),
        ('{"a": "x \\\ny"}', '{"a": "x \\\\\\ny"}'),
        ('{"a": "echo "hi" there"}', '{"a": "echo \\"hi\\" there"}'),
        ('{"a": "say "a", then "b", c", "d": 1}', '{"a": "say \\"a\\", then \\"b\\", c", "d": 1}'),
        ('{"a": "awk \'{print "x"}\' f"}', '{"a": "awk \'{print \\"x\\"}\' f"}'),
        ('{"a": """x "y"\nz"""}', '{"a": "x \\"y\\"\\nz"}'),
        ('{"a": src/main.py, "b": two words}', '{"a": "src/main.py", "b": "two words"}'),
        ('{"n": 5000.0, "e": 1E5, "z": -0.10}', '{"n": 5000.0, "e": 1E5, "z": -0.10}'),
        ('{"n": +5, "m": .5, "k": 5., "o": 007}', '{"n": 5, "m": 0.5, "k": 5.0, "o": 7}'),
        ('{"n": NaN, "i": Infinity, "x": 0x1F}', '{"n": "NaN", "i": "Infinity", "x": "0x1F"}'),
        ('{"a": [1, [2, {"b": 3', '{"a": [1, [2, {"b": 3}]]}'),
        ('{"a": [1, {"b": 2]}', '{"a": [1, {"b": 2}]}'),
        ('{"a": 1]}', '{"a": 1}'),
        ('{"name="f", "a": 1}', '{"name": "f", "a": 1}'),
        ('{"a": , "b": 2}', '{"b": 2}'),
        ('{"a" "b": 2}', '{"b": 2}'),
        ('{"a": "x', '{"a": "x"}'),
        ('{"a": "x\\', '{"a": "x\\\\"}'),
        ('{"a"', "{}"),
        ('{"a":', "{}"),
        ("{", "{}"),
        ("", ""),
    ],
)
def test_what_models_write_is_taken_for_what_they_mean(text: str, meant: str) -> None:
    for size in (1, 3, len(text) + 1):
        assert transcoded(text, size=size) == meant
    assert not meant or json.loads(meant) is not None


@pytest.mark.parametrize(
    ("text", "delivered"),
    [
        ('{"a": "rm -rf /foo', '{"a": "rm -rf /foo'),
        ('{"a": "x", "b": 12', '{"a": "x"'),
        ('{"a": "x", "b": tru', '{"a": "x"'),
        ('{"a": [1, {"b": 2', '{"a": [1, {'),
        ('{"a": "x"', '{"a": "x"'),
        ('{"a": {}', '{"a": {}'),
        ('{"a": 1}', '{"a": 1}'),
    ],
)
def test_what_was_cut_off_stays_open(text: str, delivered: str) -> None:
    assert transcoded(text, is_complete=False) == delivered


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    transcoder = Transcoder()
    pieces = [
        transcoder.feed(piece) for piece in ['{"a', '": "one', " two", '"', ", ", '"b"', ":1}"]
    ]
    assert pieces == ["{", '"a": "one', " two", "", "", "", '", "b": 1}']
