"""The unit files are checked here key by key, and by systemd's own reader where it is installed."""

import os
import plistlib
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from hearth.commands.service.launchd import guarded_folder, parse_print, plist_of
from hearth.commands.service.service_manager import TOOL_WAIT_S, ServiceState
from hearth.commands.service.service_plan import ServiceHost, ServicePlan, plan_of, stop_seconds
from hearth.commands.service.systemd import parse_show, unit_text
from hearth.shared.errors import StartError
from hearth.shared.stop_times import CHUNK_WAIT_S, END_WAIT_S

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
    "LimitLoadToSessionType": str,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}
PATH = "/venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


def host(home: str = "/home/me", python: str = "/venv/bin/python", **environ: str) -> ServiceHost:
    command = (python, "-P", "-m", "hearth.commands.main", "service", "run")
    return ServiceHost("any", Path(home), 501, environ, Path(home, ".hearth", ".env"), command)


def test_the_property_list_says_each_thing_as_launchd_reads_it() -> None:
    read = plistlib.loads(plistlib.dumps(plist_of(plan_of(host(HF_HOME="/hf"), 2), "Aqua")))
    assert {name: type(value) for name, value in read.items()} == LAUNCHD_KEYS
    assert read == {
        "Label": "local.hearth.server",
        "ProgramArguments": [
            *("/venv/bin/python", "-P", "-m", "hearth.commands.main", "service", "run"),
            "--end-with-0-if-refused",
        ],
        "WorkingDirectory": "/home/me/.hearth",
        "EnvironmentVariables": {"PATH": PATH, "HF_HOME": "/hf"},
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": 30,
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": 4096},
        "Umask": 0o077,
        "LimitLoadToSessionType": "Aqua",
        "StandardOutPath": "/home/me/.hearth/logs/service.log",
        "StandardErrorPath": "/home/me/.hearth/logs/service.log",
    }


def test_the_unit_says_each_thing_as_systemd_reads_it() -> None:
    text = unit_text(plan_of(host(HF_HOME="/hf"), 2))
    rows = re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)
    assert dict(rows) == {
        "Description": "Hearth, a local LLM server for agents",
        "Type": "exec",
        "ExecStart": '"/venv/bin/python" "-P" "-m" "hearth.commands.main" "service" "run"',
        "WorkingDirectory": "/home/me/.hearth",
        "Environment": f'"PATH={PATH}" "HF_HOME=/hf"',
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


def verified(directory: Path, text: str) -> str:
    """Return what systemd says of a unit file: nothing where all of it is understood."""
    unit = directory / "hearth.service"
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "--user", "--man=no", "verify", str(unit)],
        env={"PATH": os.environ["PATH"], "HOME": str(directory), "XDG_RUNTIME_DIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout + done.stderr + ("" if done.returncode == 0 else f"rc {done.returncode}")


@pytest.mark.process
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd")
@pytest.mark.parametrize("name", ["plain", "with $HOME and %h in it"])
def test_systemd_understands_the_whole_unit(name: str, tmp_path: Path) -> None:
    python = tmp_path / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/true")
    text = unit_text(plan_of(host(str(tmp_path / name), str(python), HF_HOME="'\"\\%h $x"), 60))
    assert verified(tmp_path, text) == ""
    assert "KillMod" in verified(tmp_path, text.replace("KillMode=", "KillMod="))
    python.unlink()
    assert "not executable" in verified(tmp_path, text)


@pytest.mark.parametrize(("flush_s", "stop_s"), [(0, 30), (2, 30), (8, 30), (9, 31), (60, 82)])
def test_a_stop_has_time_for_a_chunk_and_what_is_written(flush_s: int, stop_s: int) -> None:
    assert stop_seconds(flush_s) == stop_s
    assert CHUNK_WAIT_S + flush_s + END_WAIT_S < stop_s < TOOL_WAIT_S
    plan = plan_of(host(), flush_s)
    assert plist_of(plan, "Aqua")["ExitTimeOut"] == stop_s
    assert f"\nTimeoutStopSec={stop_s}\n" in unit_text(plan)


def files_of(plan: ServicePlan) -> str:
    return unit_text(plan) + plistlib.dumps(plist_of(plan, "Aqua")).decode()


def test_no_setting_and_no_secret_is_in_a_file() -> None:
    shell: Mapping[str, str] = {
        "PROXY_API_KEY": "key-of-mine",
        "HF_TOKEN": "token-of-mine",
        "MODEL_PATH": "model-of-mine",
        "HF_HUB_CACHE": "/cache",
    }
    text = files_of(plan_of(host(**shell), 2))
    assert "of-mine" not in text and text.count("/cache") == 2


def test_a_path_that_no_unit_file_holds_is_refused() -> None:
    with pytest.raises(StartError, match="systemd starts no program whose path has one of"):
        unit_text(plan_of(host(python="/it's/python"), 2))
    with pytest.raises(StartError, match="Rename that directory"):
        plan_of(host("/home/a\nExecStart=/bin/evil"), 2)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (
            "\tstate = running\n\tpid = 42\n\tlast exit code = 1\n",
            ServiceState(True, 42, "exit status 1"),
        ),
        (
            "\tstate = spawn scheduled\n\tlast exit code = (never exited)\n",
            ServiceState(True, None, ""),
        ),
        (
            "\tstate = not running\n\tlast exit code = 0\n",
            ServiceState(True, None, "exit status 0"),
        ),
        (
            "\tlast exit code = 78: EX_CONFIG\n\t\tpid = 7\n",
            ServiceState(True, None, "exit status 78", will_restart=True),
        ),
        (
            "\tlast terminating signal = Killed: 9\n",
            ServiceState(True, None, "signal Killed: 9", will_restart=True),
        ),
    ],
)
def test_what_launchctl_prints_is_read(text: str, state: ServiceState) -> None:
    assert parse_print(f"gui/501/local.hearth.server = {{\n{text}}}\n") == state


AGAIN = "a failure, for the 2. time since it was loaded"
REFUSED = "exit status 78: it cannot start as configured, and is not started again"


@pytest.mark.parametrize(
    ("load", "sub", "pid", "code", "status", "state"),
    [
        ("loaded", "running", 42, 0, 0, ServiceState(True, 42, AGAIN)),
        ("loaded", "dead", 0, 0, 0, ServiceState(True, None, "")),
        ("loaded", "dead", 0, 1, 0, ServiceState(True, None, "exit status 0")),
        ("loaded", "failed", 0, 1, 78, ServiceState(True, None, REFUSED)),
        ("loaded", "auto-restart", 0, 2, 9, ServiceState(True, None, "signal SIGKILL", True)),
        ("not-found", "dead", 0, 0, 0, ServiceState(False, None, "")),
    ],
)
def test_what_systemctl_shows_is_read(
    load: str, sub: str, pid: int, code: int, status: int, state: ServiceState
) -> None:
    rows = f"LoadState={load}\nSubState={sub}\nMainPID={pid}\nNRestarts=2\n"
    assert parse_show(f"{rows}ExecMainCode={code}\nExecMainStatus={status}\n") == state
    with pytest.raises(StartError, match="says nothing of ExecMainCode, ExecMainStatus"):
        parse_show(rows)


def test_a_folder_that_macos_guards_is_named() -> None:
    home = Path("/Users/me")
    assert guarded_folder(home, home / "Documents" / "hearth") == "~/Documents"
    assert guarded_folder(home, home / "DocumentsOfMine") == ""
