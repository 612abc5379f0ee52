"""Stands in for launchctl, systemctl and loginctl: keeps state in a directory, runs real processes.

`install_fakes` writes the commands. A keeper process for each service plays the manager: it starts
the unit's command, starts it again after a failure, and removes the service's state at its end.
Errors and exit statuses are those of the real tools. A test runs it dozens of times, so it imports
little: 15 ms each.
"""

import marshal
import os
import signal
import sys
import time

TYPE_CHECKING = False  # the name that type checkers know, without importing typing
if TYPE_CHECKING:
    import subprocess
    from pathlib import Path
    from typing import Any

RESTART_S = 0.1
TOOL = """\
#!{python} -IS
import sys
sys.path.insert(0, {folder!r})
from fake_service_manager import {name}
sys.exit({name}({state!r}, *sys.argv[1:]))
"""


def install_fakes(directory: "Path") -> "Path":
    """Write the three commands and an empty state; return the directory to put first on PATH."""
    tools, state = directory / "tools", directory / "manager"
    tools.mkdir(parents=True)
    (state / "jobs").mkdir(parents=True)
    (state / "domains").write_text(f"gui/{os.getuid()}")
    words = {"python": sys.executable, "folder": os.path.dirname(__file__), "state": str(state)}
    for name in ("launchctl", "systemctl", "loginctl"):
        (tools / name).write_text(TOOL.format(name=name, **words))
        (tools / name).chmod(0o755)
    return tools


class Job:
    """One loaded service: a file, which a keeper process renews for as long as it runs."""

    def __init__(self, state: str, name: str) -> None:
        self.path = f"{state}/jobs/{name.replace('/', ':')}"
        self.told_to_end = f"{state}/{os.path.basename(self.path)}.end"

    def read(self) -> "dict[str, Any]":
        try:
            with open(self.path, "rb") as file:
                return dict(marshal.load(file))
        except FileNotFoundError:
            return {}

    def write(self, **values: "Any") -> None:
        fresh = f"{self.path}.{os.getpid()}"
        with open(fresh, "wb") as file:
            marshal.dump(values, file)
        os.replace(fresh, self.path)

    def tell_to_end(self) -> None:
        with open(self.told_to_end, "wb"):
            pass

    def start(self, run: "dict[str, Any]") -> None:
        """Start a keeper that runs `run`: argv, cwd, env, log, stop_s, not_again."""
        self.write(pid=0, exit=None, restarts=0)
        if os.fork():
            while self._has_not_run():
                time.sleep(0.005)
            return
        os.setsid()
        for number in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        try:
            self._keep(run)
        finally:
            os._exit(0)

    def _has_not_run(self) -> bool:
        """Tell whether no process was started yet: one may have ended before this looks."""
        found = self.read()
        return bool(found) and not found["pid"] and found["exit"] is None

    def _keep(self, run: "dict[str, Any]") -> None:
        import subprocess

        inherited = {
            name: os.environ[name] for name in ("HOME", "PYTHONPATH") if name in os.environ
        }
        while True:
            with open(run["log"], "ab") as log:
                process = subprocess.Popen(
                    run["argv"],
                    cwd=run["cwd"],
                    env={**inherited, **run["env"]},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            last = self.read()
            self.write(**{**last, "pid": process.pid})
            self._wait(process, run["stop_s"])
            self.write(pid=0, exit=process.returncode, restarts=last["restarts"] + 1)
            if os.path.exists(self.told_to_end) or process.returncode in run["not_again"]:
                break
            time.sleep(RESTART_S)
            if not os.path.exists(self.path):
                return
        if os.path.exists(self.told_to_end):
            os.unlink(self.told_to_end)
            os.unlink(self.path)

    def _wait(self, process: "subprocess.Popen[bytes]", stop_s: float) -> None:
        asked = 0.0
        while process.poll() is None:
            if not asked and os.path.exists(self.told_to_end):
                process.send_signal(signal.SIGTERM)
                asked = time.monotonic()
            if asked and time.monotonic() - asked > stop_s:
                process.kill()
            time.sleep(0.01)


def read_text(*parts: str) -> str:
    """Return the text of a file, "" where there is none."""
    try:
        with open(os.path.join(*parts), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def fail(status: int, said: str) -> int:
    print(said, file=sys.stderr)
    return status


def loginctl(state: str, *arguments: str) -> int:
    print("Linger=no")
    return 0


# ---------------------------------------------------------------- launchctl


def launchctl(state: str, verb: str, target: str, *arguments: str) -> int:
    domain = "/".join(target.split("/")[:2])
    if domain not in read_text(state, "domains").split():
        return fail(125 if verb == "bootstrap" else 112, f"Could not find domain for {domain}")
    if verb == "bootstrap":
        return bootstrap(state, domain, arguments[0])
    if verb == "enable":
        if read_text(state, "disabled"):
            os.unlink(f"{state}/disabled")
        return 0
    if target == domain:
        return 0
    job = Job(state, target)
    found = job.read()
    if not found:
        return fail(113 if verb == "print" else 3, "Could not find service")
    if verb == "bootout" and read_text(state, "stuck"):
        return fail(1, "Boot-out failed: 1: Operation not permitted")
    return print_job(target, found) if verb == "print" else bootout(job, found)


def bootout(job: Job, found: "dict[str, Any]") -> int:
    if found["pid"]:
        job.tell_to_end()
        return fail(36, "Boot-out failed: 36: Operation now in progress")
    os.unlink(job.path)
    return 0


def print_job(target: str, found: "dict[str, Any]") -> int:
    code = "(never exited)" if found["exit"] is None else found["exit"]
    state = f"running\n\tpid = {found['pid']}" if found["pid"] else "not running"
    print(f"{target} = {{\n\tstate = {state}\n\tlast exit code = {code}\n}}")
    return 0


def bootstrap(state: str, domain: str, path: str) -> int:
    import plistlib

    with open(path, "rb") as file:
        plist = plistlib.load(file)
    job = Job(state, f"{domain}/{plist['Label']}")
    if read_text(state, "disabled") or job.read():
        return fail(5, "Bootstrap failed: 5: Input/output error")
    if os.stat(path).st_mode & 0o022:
        return fail(125, "Bootstrap failed: 125: Domain does not support specified action")
    assert os.path.basename(path) == f"{plist['Label']}.plist"
    assert plist["KeepAlive"] == {"SuccessfulExit": False}
    job.start(
        {
            "argv": plist["ProgramArguments"],
            "cwd": plist["WorkingDirectory"],
            "env": plist["EnvironmentVariables"],
            "log": plist["StandardErrorPath"],
            "stop_s": plist["ExitTimeOut"],
            "not_again": [0],
        }
    )
    return 0


# ---------------------------------------------------------------- systemctl


def systemctl(state: str, user: str, verb: str, *arguments: str) -> int:
    assert user == "--user", user
    if not read_text(state, "domains"):
        return fail(1, "Failed to connect to bus: No medium found")
    if verb == "show-environment":
        return 0
    files = os.path.join(os.environ["HOME"], ".config/systemd/user")
    loaded = os.path.join(state, "loaded")
    if verb == "daemon-reload":
        os.makedirs(loaded, exist_ok=True)
        names = {*os.listdir(loaded), *(os.listdir(files) if os.path.isdir(files) else ())}
        for each in names:
            with open(os.path.join(loaded, each), "w", encoding="utf-8") as file:
                file.write(read_text(files, each) if each.endswith(".service") else "")
        return 0
    name = next(each for each in arguments if each.endswith(".service"))
    job, unit = Job(state, name), read_text(loaded, name)
    if verb == "show":
        return show(job.read(), is_loaded=bool(unit))
    if not unit and verb != "disable":
        return fail(5, f"Failed to {verb} {name}: Unit {name} not found.")
    wants = os.path.join(files, "default.target.wants")
    if verb == "enable" and not os.path.lexists(os.path.join(wants, name)):
        os.makedirs(wants, exist_ok=True)
        os.symlink(f"../{name}", os.path.join(wants, name))
    if verb in ("stop", "restart", "disable"):
        end(job)
    if verb == "disable":
        os.unlink(os.path.join(wants, name))
        if not os.listdir(wants):
            os.rmdir(wants)
    if verb == "restart":
        job.start(run_of(unit))
        if read_text(state, "fails"):
            return fail(1, f"Job for {name} failed.")
    return 0


def end(job: Job) -> None:
    """End the unit, and wait for it."""
    if job.read().get("pid"):
        job.tell_to_end()
        while os.path.exists(job.path):
            time.sleep(0.01)
    elif job.read():
        os.unlink(job.path)


def show(found: "dict[str, Any]", *, is_loaded: bool) -> int:
    pid, status = found.get("pid", 0), found.get("exit")
    rows = {
        "LoadState": "loaded" if is_loaded else "not-found",
        "SubState": "running" if pid else "dead",
        "MainPID": pid,
        "ExecMainCode": 0 if status is None or pid else 1 if status >= 0 else 2,
        "ExecMainStatus": abs(status or 0),
        "NRestarts": found.get("restarts", 0),
    }
    print(*(f"{name}={value}" for name, value in rows.items()), sep="\n")
    return 0


def run_of(text: str) -> "dict[str, Any]":
    """Return what a unit file asks for; its words are split as systemd splits them."""
    import shlex

    rows = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    words = [each.replace("%%", "%") for each in shlex.split(rows["ExecStart"])]
    environment = [each.replace("%%", "%") for each in shlex.split(rows["Environment"])]
    assert rows["Restart"] == "on-failure" and rows["StandardError"] == "inherit"
    return {
        "argv": [words[0], *(each.replace("$$", "$") for each in words[1:])],
        "cwd": rows["WorkingDirectory"].replace("%%", "%"),
        "env": dict(each.split("=", 1) for each in environment),
        "log": rows["StandardOutput"][len("append:") :].replace("%%", "%"),
        "stop_s": int(rows["TimeoutStopSec"]),
        "not_again": [0, int(rows["RestartPreventExitStatus"])],
    }
