"""`hearth run` says on a terminal what may be expected of the model that comes with Hearth."""

import dataclasses
import io

import pytest
from rich.console import Console

from hearth.commands.chat import command
from hearth.commands.server.find_or_start import RunningServer

SMALL = RunningServer("http://127.0.0.1:4000", "", "smollm2", 8_192, False, True)


@pytest.mark.parametrize(
    ("model", "is_terminal", "is_said"),
    [("smollm2", True, True), ("smollm2", False, False), ("qwen3.5-9b", True, False)],
)
def test_the_first_model_is_told_as_what_it_is_on_a_terminal(
    model: str, is_terminal: bool, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "bytes_for_models", lambda: 16 << 30)
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, color_system=None, width=200)
    command.say_what_it_is(dataclasses.replace(SMALL, model=model), console)
    words = (
        "SmolLM2-135M: a real language model, tiny, fluent and often wrong; it shows the server. "
        "For this machine: `hearth run qwen3.5-9b`.\n"
    )
    assert out.getvalue() == words * is_said
