"""`hearth launch` starts an agent with variables, options and temporary files, and ends with it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hearth.commands.agents import launch
from hearth.commands.agents.agent_setup import Endpoint, Surroundings
from hearth.commands.agents.agent_setups import AGENTS
from hearth.commands.server.find_or_start import RunningServer
from hearth.shared.errors import StartError

pytestmark = pytest.mark.process
KEY = "sk-secret-0123456789"
CONTEXT_TOKENS = 65_536
ENDPOINT = Endpoint("http://127.0.0.1:4000", KEY, "m/x", 65_536)
# An agent that tells what it was started with, and ends with the status in its last argument.
TELLS = """#!{python}
import json, os, pathlib, sys
files = {{}}
for value in [*sys.argv, *os.environ.values()]:
    path = pathlib.Path(value)
    if "hearth-launch-" in value and path.is_file():
        files[value] = [path.read_text(), oct(path.stat().st_mode & 0o777)]
told = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "files": files}}
pathlib.Path(os.environ["TOLD"]).write_text(json.dumps(told))
sys.exit(int(sys.argv[-1]) if sys.argv[-1].isdigit() else 0)
"""
# The command, with a server that it need not look for.
PROGRAM = """
import contextlib, sys
from hearth.commands.agents import launch
from hearth.commands.server.find_or_start import RunningServer
@contextlib.contextmanager
def found(*_, **__):
    yield RunningServer("http://127.0.0.1:4000", "", "m", 65536, False, False)
    print("the server is left", flush=True)
launch.find_or_start = found
sys.exit(launch.main(["codex"]))
"""


def make_agent(directory: Path, name: str, text: str) -> None:
    file = directory / name
    file.write_text(text.format(python=sys.executable))
    file.chmod(0o755)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have all agents on PATH, in a home of their own, and a server with a key; what one tells."""

    @contextmanager
    def found(*_: Any, check: Any) -> Iterator[RunningServer]:
        check("m/x", CONTEXT_TOKENS)
        yield RunningServer("http://127.0.0.1:4000", KEY, "m/x", CONTEXT_TOKENS, False, False)

    monkeypatch.setattr(launch, "find_or_start", found)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    for agent in AGENTS.values():
        make_agent(tmp_path, agent.binary, TELLS)
    return tmp_path / "told"


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_its_users_arguments_and_the_key_in_no_argument(
    name: str, told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-user")
    assert launch.main([name, "--", "do", "--this", "7"]) == 7
    row = json.loads(told.read_text())
    assert row["arguments"][-3:] == ["do", "--this", "7"]
    assert not any(KEY in argument for argument in row["arguments"])
    assert KEY in row["environment"].values()
    assert row["environment"]["TOLD"] == str(told)
    assert ("ANTHROPIC_API_KEY" in row["environment"]) == (name != "claude")
    everything = json.dumps(row)
    assert "127.0.0.1:4000" in everything and "m/x" in everything and "65536" in everything
    assert all(mode == "0o600" for _, mode in row["files"].values())
    assert not any(Path(path).exists() for path in row["files"])


def test_no_other_provider_of_claude_code_is_left_on(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for provider in ("BEDROCK", "VERTEX", "FOUNDRY", "MANTLE", "GATEWAY", "ANTHROPIC_AWS"):
        monkeypatch.setenv(f"CLAUDE_CODE_USE_{provider}", "1")
    assert launch.main(["claude"]) == 0
    row = json.loads(told.read_text())
    ((settings, _),) = row["files"].values()
    assert not [name for name in row["environment"] if name.startswith("CLAUDE_CODE_USE_")]
    assert json.loads(settings)["env"]["CLAUDE_CODE_USE_ANTHROPIC_AWS"] == ""


def test_only_an_agent_whose_first_prompt_fits_is_started(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CONTEXT_TOKENS", 8_192)
    assert (launch.main(["claude"]), told.exists()) == (2, False)
    assert (launch.main(["pi"]), told.exists()) == (0, True)


def test_a_first_prompt_fits_exactly_beside_an_answer_and_an_untold_context_refuses_none() -> None:
    launch.check_first_prompt("launch", "claude", "m", 15_200)
    launch.check_first_prompt("launch", "claude", "m", None)
    with pytest.raises(StartError, match="takes 15,196"):
        launch.check_first_prompt("launch", "claude", "m", 15_196)


def test_settings_that_a_user_passes_by_the_same_variable_are_kept(tmp_path: Path) -> None:
    own = '{"theme": "dark", "provider": {"mine": {}}, "model": "mine/x"}'
    setup = AGENTS["opencode"].launch(
        ENDPOINT, Surroundings(tmp_path, {"OPENCODE_CONFIG_CONTENT": own}, tmp_path)
    )
    content = json.loads(setup.environment["OPENCODE_CONFIG_CONTENT"])
    assert content["theme"] == "dark" and set(content["provider"]) == {"mine", "hearth"}
    assert content["model"] == "hearth/m/x"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_agent_and_then_the_command(tmp_path: Path, number: int) -> None:
    """Ctrl-C is for the agent, which may live on; what ends the command ends the agent."""
    make_agent(tmp_path, "codex", "#!/bin/sh\ntrap '' INT\ntouch begun\nexec sleep 60\n")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert out == "the server is left\n"
