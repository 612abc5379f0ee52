"""Calls that are no objects, cut off or amid a failure: each dialect ends what it began.

A text reaches a client piece by piece, here a character each; what was told is never taken back.
"""

import json
import random
from collections.abc import Callable
from typing import Any, Final

from hypothesis import example, given, strategies as st

from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.http.http_exchange import ClientGone
from hearth.shared.errors import Overloaded, WorkerLost
from hearth.shared.wire_messages import Delta, Finished
from tests.helpers.clients.api_events import Given, called, done, frames_of, more, whole_of
from tests.helpers.clients.sdk_readers import AnthropicReader
from tests.helpers.worker.output_formats import OUTPUTS, Output, outputs, pieces, streamed

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=9)
NO_OBJECTS: Final = [
    *("ls -la", "[1, 2]", '[{"a": 1}]', "12", '"x"', "null", "true", "", " ", "\n\t", "{", "{ls}"),
    *("{ [", "\ufeff{}", "\xa0ls", "\u2028", "```json\n{}\n```", "é", "'a': 1", "}", "{1: 2}"),
]
no_objects = st.sampled_from(NO_OBJECTS) | TEXT.filter(lambda text: "{" not in text)
objects = st.dictionaries(TEXT, st.integers(-9, 9) | TEXT | st.lists(TEXT, max_size=2), max_size=3)
NAMES: Final = ("plain", "patch", "files__read", "tool_search", "made_up")
TOOLS: Final[list[dict[str, Any]]] = [
    {"type": "function", "name": "plain", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "patch"},
    {
        **{"type": "namespace", "name": "files", "description": "Of files."},
        "tools": [{"type": "function", "name": "read"}],
    },
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
]
USER: Final[list[Any]] = [{"role": "user", "content": "x"}]
MESSAGES: Final = DIALECTS["messages"].parse({"messages": USER})
RESPONSES: Final = DIALECTS["responses"].parse({"input": "x", "tools": TOOLS})
OLLAMA: Final = DIALECTS["ollama_chat"].parse({"model": "m", "messages": USER})
CHAT: Final = DIALECTS["chat"].parse(
    {
        "messages": USER,
        "tools": [
            {"type": "function", "function": {"name": "plain"}},
            {"type": "custom", "custom": {"name": "patch"}},
        ],
    }
)
ENDS: Final[dict[str, Callable[[], Given]]] = {
    "stop": done,
    "a stop string": lambda: done("stop", "END"),
    "length": lambda: done("length"),
    "calls": lambda: done("tool_calls"),
    "a worker that died": lambda: WorkerLost("gone"),
    "a cancel": ClientGone,
    "no room": lambda: Overloaded("busy"),
}
anthropic_reader = AnthropicReader()


@st.composite
def answers(draw: Any) -> list[Delta]:
    """Return an answer in pieces: speech and calls in any order, some of them no objects."""
    rows: list[Delta] = []
    for place in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["reasoning", "content", *NAMES]))
        text = draw(TEXT if kind not in NAMES else objects.map(json.dumps) | no_objects)
        parts = [*text] if draw(st.booleans()) else [text]
        if kind in NAMES:
            rows += [called(f"c{place}", kind), *map(more, parts)]
        else:
            rows += [Delta("r", 0, kind, part) for part in parts]
    return rows


def calls_of(rows: list[Delta]) -> list[tuple[str, str]]:
    """Return the name and the text of each call."""
    found: list[tuple[str, str]] = []
    for row in rows:
        if row.call is not None:
            found.append((row.call.name, ""))
        if row.channel == "tool_call":
            found[-1] = (found[-1][0], found[-1][1] + row.text)
    return found


def object_of(text: str) -> dict[str, Any]:
    """Return the object that `text` is; an empty one where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


# ---------------------------------------------------------------- Responses


@given(answers(), st.sampled_from(sorted(ENDS)))
@example([called("c", "plain"), *map(more, "ls -la")], "calls")
@example([called("c", "plain", "ls"), called("d", "patch", '{"input": "x"}')], "a cancel")
def test_an_item_that_was_added_was_never_closed(rows: list[Delta], end: str) -> None:
    kept: list[dict[str, Any]] = []
    given_rows = [*rows, ENDS[end]()]
    frames = frames_of(
        RESPONSES, DIALECTS["responses"].writer, given_rows, store_response=kept.append
    )
    events = [json.loads(frame.split(b"data: ")[1]) for frame in frames]
    assert [row["sequence_number"] for row in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    own = [row for row in events if "output_index" in row]
    for index, item in enumerate(output):
        first, *between, last = [row for row in own if row["output_index"] == index]
        assert first["type"] == "response.output_item.added"
        assert (last["type"], last["item"]) == ("response.output_item.done", item)
        assert item["status"] in ("completed", "incomplete")
        opened = {row["type"].rsplit(".", 1)[0] for row in between}
        ended = [row["type"].rsplit(".", 1)[0] for row in between if row["type"].endswith(".done")]
        assert sorted(opened) == sorted(ended), "each part of it has one end too"
    told = [item for item in output if "call_id" in item]
    for item, (_, text) in zip(told, calls_of(rows), strict=True):
        is_function = item["type"] == "function_call"
        given_text = item["input"] if "input" in item else item["arguments"]
        assert given_text == text if is_function else given_text in ("", {}) or object_of(text)
    if isinstance(given_rows[-1], Finished):
        assert kept[0]["output"] == output, "what is stored is what was told"
        assert whole_of(RESPONSES, given_rows)["output"] == output


# ---------------------------------------------------------------- Messages


@given(answers(), st.sampled_from(["stop", "a stop string", "length", "calls"]))
@example([called("c", "plain"), *map(more, "ls -la")], "calls")
@example([called("c", "plain", "ls"), called("d", "plain", '{"a": 1}')], "calls")
def test_anthropics_sdk_raised_at_arguments_that_are_no_object(rows: list[Delta], end: str) -> None:
    frames = frames_of(MESSAGES, DIALECTS["messages"].writer, [*rows, ENDS[end]()])
    told = anthropic_reader.message(frames)["content"]
    inputs = [block["input"] for block in told if block["type"] == "tool_use"]
    assert inputs == [object_of(text) for _, text in calls_of(rows)]
    whole = whole_of(MESSAGES, [*rows, ENDS[end]()])["content"]
    assert [block["input"] for block in whole if block["type"] == "tool_use"] == inputs
    assert len(whole) == len(told)


@example("{")
@given(objects.map(json.dumps))
def test_a_call_cut_off_behind_its_brace_was_told_as_one_without_arguments(text: str) -> None:
    """A worker holds back a value that is no string, so of `{"dry_run": tr` it gives the brace."""
    for cut in {text[:count] for count in (1, 2, len(text))}:
        given_rows: list[Given] = [called("c", "plain"), *map(more, cut), done("length")]
        frames = frames_of(MESSAGES, DIALECTS["messages"].writer, given_rows)
        assert anthropic_reader.message(frames)["stop_reason"] == "max_tokens"
        assert written(frames) == cut, "nobody closes half a command"


def written(frames: list[bytes]) -> str:
    """Return what the deltas of an input add up to."""
    events = [json.loads(frame.split(b"data: ")[1]) for frame in frames]
    return "".join(row.get("delta", {}).get("partial_json", "") for row in events)


# ---------------------------------------------------------------- Ollama and chat


@given(answers(), st.sampled_from(["stop", "calls"]))
@example([called("c", "plain", "ls"), called("d", "plain", '{"a": 1}')], "calls")
def test_ollama_lost_a_call_whose_arguments_are_no_object(rows: list[Delta], end: str) -> None:
    frames = frames_of(OLLAMA, DIALECTS["ollama_chat"].writer, [*rows, ENDS[end]()])
    told = [call for row in map(json.loads, frames) for call in calls_in(row)]
    expected = [(name, object_of(text)) for name, text in calls_of(rows)]
    assert [(call["name"], call["arguments"]) for call in told] == expected
    assert [call["index"] for call in told] == [*range(len(told))]
    assert calls_in(whole_of(OLLAMA, [*rows, ENDS[end]()])) == told


def calls_in(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [call["function"] for call in row["message"].get("tool_calls", ())]


@given(answers(), st.sampled_from(["stop", "a stop string", "length", "calls"]))
@example([called("c", "patch", '{"path": "/etc", "input": "rm')], "length")
def test_a_chats_custom_tool_got_a_pair_of_what_was_cut_off(rows: list[Delta], end: str) -> None:
    whole = whole_of(CHAT, [*rows, ENDS[end]()])
    calls = whole["choices"][0]["message"].get("tool_calls", [])
    for call, (name, text) in zip(calls, calls_of(rows), strict=True):
        if name == "patch":
            assert call["custom"]["input"] == "" or object_of(text)
        else:
            assert call["function"] == {"name": name, "arguments": text}


# ---------------------------------------------------------------- what models write

WRITTEN: Final = [each for path in sorted(OUTPUTS.glob("*.jsonl")) for each in outputs(path.stem)]
ODD: Final = [
    *('{"a": ', "ls", '"x', '"', ",", "}", "}}", "1", "01", "-", "1e999", "NaN", "\\ud83d", "\\x"),
    *("\n", "\xa0", "'a'", ": ", "[", "[1]", "True", "{", "é", "\x00", "// c", "\ufeff", "\\"),
]


@given(
    st.sampled_from(WRITTEN),
    st.lists(st.tuples(st.integers(0, 999), st.integers(0, 4), st.sampled_from(ODD)), max_size=3),
    st.floats(0, 1),
    st.randoms(use_true_random=False),
)
def test_no_format_gives_a_call_at_which_anthropics_sdk_raises(
    output: Output, edits: list[tuple[int, int, str]], cut: float, chance: random.Random
) -> None:
    text = output.text
    for place, count, odd in edits:
        at = place % (len(text) + 1)
        text = text[:at] + odd + text[at + count :]
    is_whole = cut > 0.5
    text = text if is_whole else text[: round(2 * cut * len(text))]
    parts = streamed(output.splitter(), pieces(text, chance), is_whole)
    rows: list[Given] = []
    for part in parts:
        if part.name:
            rows.append(called(f"c{len(rows)}", part.name, part.text))
        else:
            rows.append(Delta("r", 0, part.channel, part.text))
    rows.append(done("stop" if is_whole else "length"))
    told = anthropic_reader.message(frames_of(MESSAGES, DIALECTS["messages"].writer, rows))[
        "content"
    ]
    whole = whole_of(MESSAGES, rows)["content"]
    assert not is_whole or [block.get("input") for block in told] == [
        block.get("input") for block in whole
    ]
