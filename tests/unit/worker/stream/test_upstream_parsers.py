"""Parsers of mlx-vlm: read where they are installed, said to be missing where they are not."""

import re
import sys

import pytest

from hearth.worker.stream.model_output_format import OutputFormat
from hearth.worker.stream.tool_calls.python_calls import python_calls
from hearth.worker.stream.tool_calls.request_tools import RequestTools
from tests.helpers.worker.output_formats import STAND_INS

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
OUTPUT = '<|START_ACTION|>[{"tool_name": "read", "parameters": {"path": "a"}}]<|END_ACTION|>'


def test_calls_of_a_format_of_mlx_vlm_are_read_with_it() -> None:
    parts = OutputFormat(STAND_INS["cohere"]).read(OUTPUT, False, TOOLS)
    assert [call.name for call in parts.calls] == ["read"]


@pytest.mark.parametrize("name", ["cohere", "minimax_m3"])
def test_without_mlx_vlm_such_calls_stay_text_and_the_log_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    reader = OutputFormat(STAND_INS[name])
    assert "tool calls stay text: to have this model's read, install the extra" in caplog.text
    parts = reader.read(OUTPUT, False, TOOLS)
    assert not parts.calls and "tool_name" in parts.content


def test_without_mlx_vlm_the_formats_of_mlx_lm_raise_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    OutputFormat(STAND_INS["pythonic"])
    assert not caplog.text


def test_no_pattern_is_made_of_a_tools_name_for_python_remembers_patterns() -> None:
    name = "cAnArY.77-31"
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]
    calls = python_calls(f"[{name}(), {name} ()]", RequestTools(tools))
    assert [call.name for call in calls] == [name, name]
    remembered = [str(key) for key in re._cache]  # type: ignore[attr-defined]
    assert not [key for key in remembered if "cAnArY" in key]
