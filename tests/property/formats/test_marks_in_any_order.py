"""A family's marks whole, cut, doubled, nested and out of order: what a client gets of them.

What is drawn are pieces of the family's own cases, its marks, names of tools, JSON and words that
occur once each, so that it shows which are lost.
"""

import json
import random
import re
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import pytest
from hypothesis import Phase, given, settings, strategies as st

from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.request.parsed_request import Dialect
from hearth.shared.wire_messages import Delta
from hearth.worker.formats.shared.output_format import OutputFormat
from hearth.worker.stream.answer_parts import AnswerPart
from tests.helpers.clients.api_events import called, done, frames_of
from tests.helpers.families.family_cases import TOOLS, family_names, written_family
from tests.helpers.worker.output_formats import joined, marks_of, pieces, streamed

NAMES: Final = [each["function"]["name"] for each in TOOLS]
WORD: Final = "\0"  # stands for one
OTHERS: Final = [
    *(WORD, f'{{"name": "get_weather", "arguments": {{"city": "{WORD}"}}}}', "{", "}", '"', "["),
    *(
        f'{{"city": "{WORD}"}}',
        f'get_weather(city="{WORD}")',
        f'get_weather\n{{"city": "{WORD}',
        "]",
    ),
    *(" ", "\n", "\n\n", ". ", "```", *NAMES),
]
# Families whose headers, of messages or of calls, are left out with what stands in them.
WITH_HEADERS: Final = {"gpt_oss", "inkling", "kimi-k3", "muse_glimmer", "solar-open"}
USER: Final[list[Any]] = [{"role": "user", "content": "x"}]
CHAT: Final = [{"type": "function", "function": {"name": name}} for name in NAMES]
RESPONSES: Final = [{"type": "function", "name": name, "parameters": {}} for name in NAMES]
BODIES: Final[dict[Dialect, dict[str, Any]]] = {
    "chat": {"messages": USER, "tools": CHAT},
    "messages": {"messages": USER},
    "responses": {"input": "x", "tools": RESPONSES},
    "ollama_chat": {"model": "m", "messages": USER},
}


@cache
def read_by(name: str) -> SimpleNamespace:
    """Return a family's reader, the pieces of its cases, its marks, and those no content has."""
    family = written_family(name)
    reader = OutputFormat(family.tokenizer, family.tool_form)
    ends = {*family.ends, family.answer_end, family.call_end}
    texts = [case.text for case in family.cases.values()]
    framing = [mark.replace("{name}", NAMES[0]) for mark in reader.model_format.framing]
    marks = {
        *marks_of(reader.model_format),
        *reader.think_marks,
        *reader.model_format.edges,
        *framing,
    }
    written = "".join((*texts, *marks))
    added = [each for each in (*family.controls, *family.marks) if each in written]
    marks = {mark for mark in (*marks, *added) if mark and not any(end in mark for end in ends)}
    cut = re.compile(f"({'|'.join(map(re.escape, sorted(marks, key=len, reverse=True)))})")
    cases = [cut.split(text) for text in texts if not any(end in text for end in ends)]
    never = {*added} - ends
    return SimpleNamespace(reader=reader, cases=cases, marks=sorted(marks), cut=cut, never=never)


@st.composite
def texts_of(draw: Any, own: Any) -> str:
    marks = st.sampled_from(own.marks)
    cut = st.builds(lambda mark, end: mark[:end], marks, st.integers(1, 30))
    piece = st.one_of(marks, marks, cut, st.sampled_from(OTHERS), st.just(WORD))
    parts = draw(st.lists(piece, max_size=12) | st.sampled_from(own.cases).map(list)) or [WORD]
    for _ in range(draw(st.integers(0, 4))):
        at, other = (draw(st.integers(0, len(parts) - 1)) for _ in range(2))
        edit = draw(st.sampled_from(["put", "double", "drop", "swap", "cut"]))
        if edit == "put":
            parts.insert(at, draw(piece))
        elif edit == "swap":
            parts[at], parts[other] = parts[other], parts[at]
        else:
            parts[at] = {"double": parts[at] * 2, "drop": ""}.get(edit, parts[at][: other + 1])
    words = iter(range(999))
    return re.sub(WORD, lambda _: f"w{next(words)}w", "".join(parts))


REAL: Final = [pytest.param(name, marks=pytest.mark.night) for name in family_names(is_real=True)]


@pytest.mark.parametrize("name", [*family_names(is_real=False), *REAL])
@given(data=st.data())
@settings(max_examples=25, phases=[Phase.generate])
def test_marks_in_any_order_are_no_content_and_lose_nothing(name: str, data: st.DataObject) -> None:
    own = read_by(name)
    text = data.draw(texts_of(own))
    text = text[: data.draw(st.integers(0, len(text)) | st.just(len(text)))]
    is_complete, is_thinking = data.draw(st.booleans()), data.draw(st.booleans())
    may_think = own.reader.model_format.leaves_thinking_open and data.draw(st.booleans())

    def read(cut: Any) -> list[AnswerPart]:
        splitter = own.reader.splitter(is_thinking, TOOLS, may_think=may_think)
        return joined(streamed(splitter, cut, is_complete))

    parts = read([text])
    chance = random.Random(data.draw(st.integers(0, 999)))
    assert parts == read(text) == read(pieces(text, chance)), "it says the same however it is cut"
    content = "".join(part.text for part in parts if part.channel == "content")
    bare = re.sub(r"(?s)```.*?(?:```|$)", "`", content)  # which is a quotation mark
    bare = re.sub(rf"([`'\"]){own.cut.pattern}(?=\1)", "", bare)
    assert not [mark for mark in own.never if mark in bare], "but quoted, or in code"
    calls = [part for part in parts if part.name]
    for call in calls if is_complete else []:
        assert not call.text.startswith("{") or isinstance(json.loads(call.text), dict)
    said = re.findall(r"w\d+w", " ".join(f"{part.name} {part.text}" for part in parts))
    words = re.findall(r"w\d+w", text)
    # What a client was told as thinking is told again where nobody ended the block.
    assert calls or said in (words, words * (1 + may_think)) or name in WITH_HEADERS, "none is lost"
    rows = [
        called(f"c{at}", part.name, part.text)
        if part.name
        else Delta("r", 0, part.channel, part.text)
        for at, part in enumerate(parts)
    ]
    for dialect, body in BODIES.items():
        api = DIALECTS[dialect]
        told = b"".join(frames_of(api.parse(body), api.writer, [*rows, done()])).decode()
        for begin, end in (
            ("event: content_block_start", "event: content_block_stop"),
            ("event: response.output_item.added", "event: response.output_item.done"),
        ):
            assert told.count(begin) == told.count(end), "each item that was begun is ended"
