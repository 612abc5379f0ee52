"""`hearth launch` starts an agent with variables, options and temporary files, and ends with it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
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


def found_with(context_tokens: int) -> Any:
    """Return a `find_or_start` that finds a server of the first model with such a context."""

    @contextmanager
    def found(*_: Any, check: Any) -> Iterator[RunningServer]:
        check("smollm2", context_tokens)
        yield RunningServer("http://127.0.0.1:4000", KEY, "smollm2", context_tokens, False, False)

    return found


def make_agent(directory: Path, name: str, text: str) -> None:
    file = directory / name
    file.write_text(text.format(python=sys.executable))
    file.chmod(0o755)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have all agents on PATH, in a home of their own, and a server with a key; what one tells."""

    @contextmanager
    def found(*_: Any, **__: Any) -> Iterator[RunningServer]:
        yield RunningServer("http://127.0.0.1:4000", KEY, "m/x", 65_536, False, False)

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


def test_an_http_proxy_of_the_user_is_not_asked_for_this_machine(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy", "https_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert launch.main(["pi"]) == 0
    assert "NO_PROXY" not in json.loads(told.read_text())["environment"]
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", ".corp")
    assert launch.main(["pi"]) == 0
    environment = json.loads(told.read_text())["environment"]
    assert environment["NO_PROXY"] == environment["no_proxy"] == ".corp,127.0.0.1"
    assert environment["https_proxy"] == "http://proxy.example:3128"


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


def test_what_a_killed_command_left_is_removed_by_the_next(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(told.parent))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, held = (told.parent / f"hearth-launch-{pid}-x" for pid in (ended.pid, os.getpid()))
    for directory in (left, held):
        directory.mkdir()
        (directory / "settings.json").write_text(KEY)
    assert launch.main(["claude"]) == 0
    assert not left.exists() and held.exists()
    assert [path for path in told.parent.glob("hearth-launch-*")] == [held]


@pytest.mark.parametrize("name", AGENTS)
def test_only_an_agent_whose_first_prompt_fits_starts_with_the_first_model(
    name: str, told: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "find_or_start", found_with(8_192))
    monkeypatch.setattr(launch, "bytes_for_models", lambda: 16 << 30)
    assert launch.main([name]) == (0 if name == "pi" else 2)
    assert told.exists() == (name == "pi")
    if name == "claude":
        assert capsys.readouterr().err == (
            "Claude Code's first prompt is 11,400 tokens or more, and smollm2 takes 8,192, of "
            "which an answer may be 2,048: hearth launch claude --model qwen3.5-9b\n"
        )


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


def test_settings_of_the_system_stay_beside_ours_for_qwen_code(tmp_path: Path) -> None:
    system = tmp_path / "system.json"
    system.write_text('{"tools": {"exclude": ["run_shell_command"]}, "model": {"a": 1}}')
    environ = {"QWEN_CODE_SYSTEM_SETTINGS_PATH": str(system)}
    setup = AGENTS["qwen"].launch(ENDPOINT, Surroundings(tmp_path, environ, tmp_path))
    settings = json.loads(setup.files["settings.json"])
    assert settings["tools"] == {"exclude": ["run_shell_command"]}
    assert settings["model"] == {"a": 1, "name": "m/x"}


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
