"""The unit files are checked here key by key, and by systemd's own reader where it is installed."""

import plistlib
import re
from pathlib import Path

import pytest

from hearth.commands.service import service_manager
from hearth.commands.service.launchd import Launchd, parse_print
from hearth.commands.service.service_manager import STOP_S, TOOL_WAIT_S, ServiceState
from hearth.commands.service.systemd import Systemd, parse_show
from hearth.shared.stop_signals import CHUNK_WAIT_S, END_WAIT_S, FLUSH_WAIT_S

# launchd.plist(5): the keys that are used, with the type of their value.
LAUNCHD_KEYS = {
    "Label": str,
    "ProgramArguments": list,
    "WorkingDirectory": str,
    "EnvironmentVariables": dict,
    "RunAtLoad": bool,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "SoftResourceLimits": dict,
    "Umask": int,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}
PATH = "/venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


HEARTH = Path("/home/me/.hearth")


@pytest.fixture(autouse=True)
def shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell and the Python of a user whose home is /home/me."""
    for name in ("XDG_CONFIG_HOME", *service_manager.CARRIED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("HF_HOME", "/hf")
    monkeypatch.setenv("HEARTH_MODELS_DIR", "/models")
    run_by(monkeypatch, "/venv/bin/python")


def run_by(monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    command = (python, "-P", "-m", "hearth.commands.main", "service", "run")
    monkeypatch.setattr(service_manager, "COMMAND", command)


def unit_text() -> str:
    return Systemd(HEARTH).unit_of().decode()


def test_the_property_list_says_each_thing_as_launchd_reads_it() -> None:
    read = plistlib.loads(Launchd(HEARTH).unit_of())
    assert {name: type(value) for name, value in read.items()} == LAUNCHD_KEYS
    assert read == {
        "Label": "local.hearth.server",
        "ProgramArguments": [
            *("/venv/bin/python", "-P", "-m", "hearth.commands.main", "service", "run"),
            "--end-with-0-if-refused",
        ],
        "WorkingDirectory": "/home/me/.hearth",
        "EnvironmentVariables": {"PATH": PATH, "HF_HOME": "/hf", "HEARTH_MODELS_DIR": "/models"},
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": 30,
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": 4096},
        "Umask": 0o077,
        "StandardOutPath": "/home/me/.hearth/logs/service.log",
        "StandardErrorPath": "/home/me/.hearth/logs/service.log",
    }


def test_the_unit_says_each_thing_as_systemd_reads_it() -> None:
    text = unit_text()
    rows = re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)
    assert dict(rows) == {
        "Description": "Hearth, a local LLM server for agents",
        "Type": "exec",
        "ExecStart": '"/venv/bin/python" "-P" "-m" "hearth.commands.main" "service" "run"',
        "WorkingDirectory": "/home/me/.hearth",
        "Environment": f'"PATH={PATH}" "HF_HOME=/hf" "HEARTH_MODELS_DIR=/models"',
        "StandardOutput": "append:/home/me/.hearth/logs/service.log",
        "StandardError": "inherit",
        "UMask": "0077",
        "Restart": "on-failure",
        "RestartSec": "10",
        "RestartPreventExitStatus": "78",
        "KillMode": "mixed",
        "TimeoutStopSec": "30",
        "WantedBy": "default.target",
    }
    assert len(rows) == 14
    assert re.findall(r"^\[\w+\]$", text, re.MULTILINE) == ["[Unit]", "[Service]", "[Install]"]


def test_a_stop_has_time_for_a_chunk_and_what_is_written() -> None:
    assert CHUNK_WAIT_S + FLUSH_WAIT_S + END_WAIT_S + 5 < STOP_S < TOOL_WAIT_S
    assert plistlib.loads(Launchd(HEARTH).unit_of())["ExitTimeOut"] == STOP_S
    assert f"\nTimeoutStopSec={STOP_S}\n" in unit_text()


def test_no_setting_and_no_secret_is_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROXY_API_KEY", "HF_TOKEN", "MODEL_PATH"):
        monkeypatch.setenv(name, "that-of-mine")
    monkeypatch.setenv("HF_HUB_CACHE", "/cache")
    text = unit_text() + Launchd(HEARTH).unit_of().decode()
    assert "of-mine" not in text and text.count("/cache") == 2


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (
            "\tstate = running\n\tpid = 42\n\tlast exit code = 1\n",
            ServiceState(42, "exit status 1"),
        ),
        (
            "\tstate = spawn scheduled\n\tlast exit code = (never exited)\n",
            ServiceState(None, ""),
        ),
        (
            "\tstate = not running\n\tlast exit code = 0\n",
            ServiceState(None, "exit status 0"),
        ),
        (
            "\tlast exit code = 78: EX_CONFIG\n\t\tpid = 7\n",
            ServiceState(None, "exit status 78", will_restart=True),
        ),
        (
            "\tlast terminating signal = Killed: 9\n",
            ServiceState(None, "signal Killed: 9", will_restart=True),
        ),
    ],
)
def test_what_launchctl_prints_is_read(text: str, state: ServiceState) -> None:
    assert parse_print(f"gui/501/local.hearth.server = {{\n{text}}}\n") == state


AGAIN = "a failure, for the 2. time since it was loaded"


@pytest.mark.parametrize(
    ("load", "sub", "pid", "code", "status", "state"),
    [
        ("loaded", "running", 42, 0, 0, ServiceState(42, AGAIN)),
        ("loaded", "dead", 0, 0, 0, ServiceState(None, "")),
        ("loaded", "dead", 0, 1, 0, ServiceState(None, "exit status 0")),
        ("loaded", "failed", 0, 1, 78, ServiceState(None, "exit status 78")),
        ("loaded", "auto-restart", 0, 2, 9, ServiceState(None, "signal 9 (Killed)", True)),
        ("not-found", "dead", 0, 0, 0, None),
    ],
)
def test_what_systemctl_shows_is_read(
    load: str, sub: str, pid: int, code: int, status: int, state: ServiceState | None
) -> None:
    rows = f"LoadState={load}\nSubState={sub}\nMainPID={pid}\nNRestarts=2\n"
    assert parse_show(f"{rows}ExecMainCode={code}\nExecMainStatus={status}\n") == state
