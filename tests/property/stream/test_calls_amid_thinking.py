"""Calls amid thinking: made where the answer ends behind them, else thoughts, in linear time."""

from collections.abc import Callable
from typing import Any, Final

import pytest

from hearth.worker.formats.shared.output_format import OutputFormat
from hearth.worker.stream.lookahead_buffer import LookaheadBuffer
from hearth.worker.stream.output_processor import OutputProcessor
from tests.helpers.families.family_cases import TOOLS, family_names, written_family
from tests.helpers.worker.output_formats import Pieces, joined, streamed

# By case: what stands behind "I think." (C a call of Oslo, D one of Rome, X one of no tool, H half
# of C, E what ends thinking), the cities of the calls that are made, and the content.
CASES: Final[dict[str, tuple[str, list[str], str]]] = {
    "the answer ends behind it": ("C", ["Oslo"], ""),
    "the block ends behind it": ("C\nE\n", ["Oslo"], ""),
    "another follows": ("C\nD", ["Oslo", "Rome"], ""),
    "another follows behind the block": ("C\nE\n\nD", ["Oslo", "Rome"], ""),
    "it is made again": ("C\nE\nC", ["Oslo"], ""),
    "it is made again and again": ("C\nC\nC", ["Oslo"], ""),
    "more thinking follows": ("C\nso moreEanswer", [], "answer"),
    "more thinking, then another": ("C so moreED", ["Rome"], ""),
    "more thinking, then another amid it": ("C so more\nD", ["Rome"], ""),
    "content follows": ("C\nE\n\nanswer", [], "answer"),
    "content and another follow": ("C\nE\n\nanswer\nD", ["Rome"], "answer"),
    "it is quoted": ("`C`Eanswer", [], "answer"),
    "it is quoted at the end": ("`C`", [], ""),
    "it is half": ("H", [], ""),
    "it is half and content follows": ("HE\nanswer", [], "answer"),
    "it is no tool's": ("X", [], ""),
    "it is no tool's, and another follows": ("XED", ["Rome"], ""),
    "one of no tool follows": ("C\nXE", [], ""),
}
# Their answers are rows of messages, or (Apertus) calls stand amid thinking by design.
OTHERS: Final = {"apertus", "gpt_oss", "inkling", "kimi-k3", "muse_glimmer", "solar-open"}


def marks_and_call(name: str) -> tuple[OutputFormat, str, str, str]:
    family = written_family(name)
    reader = OutputFormat(family.tokenizer, family.tool_form)
    start, end = reader.think_marks[:2]
    if not start or name in OTHERS:
        pytest.skip("it has no thinking between marks")
    text = family.cases["call"].text.replace(start, "")
    return reader, start, end, text.rpartition(end)[2].strip()


def hold(name: str, of: Callable[[str], list[str]]) -> None:
    reader, start, end, call = marks_and_call(name)
    texts = {"C": call, "D": call.replace("Oslo", "Rome"), "E": end}
    texts |= {"X": call.replace("get_weather", "get_x"), "H": call[: call.index("Oslo") + 2]}
    for case, (form, cities, content) in CASES.items():
        for opened in (start, ""):
            text = f"{opened}I think.\n" + "".join(texts.get(each, each) for each in form)
            told = []
            for cut in ([text], of(text)):
                splitter = reader.splitter(not opened, TOOLS)
                told.append(joined(streamed(splitter, cut, is_complete=True)))
            parts: Any = splitter.collector.parts
            assert told[0] == told[1], (case, "it says the same however it is cut")
            assert [call.arguments["city"] for call in parts.calls] == cities, case
            assert parts.content.strip() == content, case
            assert "I think." in parts.reasoning, case


@pytest.mark.parametrize("name", family_names(is_real=False))
def test_a_call_amid_thinking_is_made_where_the_answer_ends_behind_it(name: str) -> None:
    hold(name, list)


@pytest.mark.night
@pytest.mark.parametrize("name", family_names(is_real=True))
def test_makers_calls_amid_thinking_are_made_where_the_answer_ends_behind_them(name: str) -> None:
    hold(name, list)


@pytest.mark.parametrize("form", ["C", "X", "C so ", "H ", "CE"])
def test_calls_amid_thinking_are_read_a_few_times_however_many_they_are(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, _, end, call = marks_and_call("glm-z1")
    texts = {"C": f"\n{call}", "X": f"\n{call.replace('get_weather', 'get_x')}", "E": end}
    texts["H"] = texts["C"][: texts["C"].index("Oslo")]
    text = "I think." + "".join(texts.get(each, each) for each in form) * 200
    rewound, rewind = [0], LookaheadBuffer.rewind

    def counted(buffer: LookaheadBuffer) -> int:
        rewound.append(rewind(buffer))
        return rewound[-1]

    monkeypatch.setattr(LookaheadBuffer, "rewind", counted)
    streamed(reader.splitter(True, TOOLS), [text], is_complete=True)
    assert sum(rewound) < 4 * len(text)


def test_a_stop_string_behind_a_second_call_is_none_where_one_is_allowed() -> None:
    reader, _, _, call = marks_and_call("hunyuan-a13b")
    text = f"{call}\n{call}\nSTOP"
    for pieces in ([text], list(text)):
        output = OutputProcessor(Pieces(pieces), ["STOP"], reader.splitter(False, TOOLS), False)
        stops = [output.add(n, None).stop for n in range(len(pieces)) if not output.is_cut]
        assert output.is_cut and not any(stops)
