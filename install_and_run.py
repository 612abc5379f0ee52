"""Runs Hearth with one command: checks this machine, installs into .venv, starts the server.

Standard library only. Python 3.6 must be able to compile this file, so that an old Python can say
what to install; annotations are therefore quoted.
"""

import argparse
import contextlib
import ctypes
import fcntl
import functools
import importlib.util
import json
import os
import platform
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

TYPE_CHECKING = False  # known to type checkers by its name, without importing typing
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

PROJECT = Path(__file__).resolve().parent
VENV = PROJECT / ".venv"
VERSION = "{}.{}".format(*sys.version_info[:2])
SUPPORTED = ("3.12", "3.13", "3.11")  # in the order of preference
DISK_BYTES = 3000000000  # 1.4 GB for the install, and as much for pip's cache and unpacking
DISK_BYTES_CUDA = 7000000000  # more than twice as much, for the CUDA libraries
END_S_MAX = 5  # time for pip to remove its temporary files
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

PROBE = (
    "import sys, platform, venv, ensurepip;"
    "print('%d.%d' % sys.version_info[:2], platform.machine(), sys.executable)"
)
VENV_PROBE = "import sys; print('%d.%d' % sys.version_info[:2], sys.prefix)"
MODEL_PROBE = (
    "import os; from hearth.shared.models.model_path import builtin_model;"
    "from hearth.shared.paths import env_file;"
    "from hearth.shared.settings import load_settings;"
    "print(builtin_model(load_settings(os.environ, env_file()).model_path).name)"
)
CONFIGURED = r"^version(?:_info)?\s*=\s*(\d+\.\d+)"
# pip writes the second form if the path is too long for the first or has a space.
SHEBANG = r"\A#!(/.*?python[\d.]*)(?:\s.*)?$|\A#!/bin/sh\n'''exec' \"?(.+?)\"? \"\$0\""
# Each of these variables would make .venv's Python import foreign code, or run another Python.
FOREIGN_VARIABLES = ("PYTHONHOME", "PYTHONPATH", "PYTHONSAFEPATH", "__PYVENV_LAUNCHER__")

HELP = """\
Installs Hearth into .venv if needed and starts it. Settings are read from the environment,
then from .env; the options below come before both.

commands:
  run, launch, pull, ...    install what is missing, then be `hearth run`, `hearth launch`, ... in
                            this directory; `.venv/bin/hearth --help` lists all commands
  test                      install what the tests need and test what users are promised
  test all                  the same with all that takes long, a browser, npm or the network
  test fast                 run those that need no process and no model: under a minute
  test [pytest arguments]   run pytest with these arguments

examples:
  python3 install_and_run.py
  python3 install_and_run.py --model mlx-community/Qwen3-8B-4bit --port 4001
  python3 install_and_run.py run qwen3.5-9b
  python3 install_and_run.py launch claude --model qwen3.5-9b
  python3 install_and_run.py test tests/unit -q"""
PYTHON_HELP = (
    "Hearth needs Python 3.11, 3.12 or 3.13 with venv, this is Python {}, at {}, and no working "
    "one was found on PATH or in the usual places: install one with `{}`, or install uv, which "
    "fetches one by itself, and run the same command again."
)
INSTALL_PYTHON = {
    "Darwin": "brew install python@3.12",
    "Linux": "sudo apt install python3.12 python3.12-venv` or `sudo dnf install python3.12",
}


class Stop(Exception):
    """Ends the command with status 1; the text is for the user."""


def platform_problem(system: str, machine: str, mac_release: str) -> "str | None":
    """Return why Hearth can't run on this platform, or None if it can."""
    here = "{} on {}".format(system or "an unknown system", machine or "an unknown processor")
    supported = "Supported: macOS 14 or newer on Apple silicon, Linux on x86_64 or aarch64."
    if system == "Darwin" and machine != "arm64":
        return (
            f"This is {here}, and MLX needs Apple silicon. {supported} If this Mac has Apple "
            "silicon, this Python is an Intel build: start with another, as /opt/homebrew/bin's."
        )
    if system == "Darwin" and 11 <= int(mac_release.split(".")[0] or 0) < 14:
        return f"This is macOS {mac_release}, and MLX needs 14. {supported} Update macOS."
    if system != "Darwin" and (system, machine) not in (("Linux", "x86_64"), ("Linux", "aarch64")):
        hint = " WSL 2 on Windows is a Linux." if system == "Windows" else ""
        return f"This is {here}, for which MLX has no build. {supported}{hint}"
    return None


def cuda_problem() -> "str | None":
    """Return why MLX's CUDA build can't be imported here, or None if it can."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"--cuda needs Linux with NVIDIA's driver, and there is none: {error}."
    return None


def is_usable_here() -> bool:
    """Return whether this interpreter has a supported version and can make a .venv."""
    modules = ("venv", "ensurepip")  # a separate package in Debian
    return VERSION in SUPPORTED and all(map(importlib.util.find_spec, modules))


def find_interpreter() -> "str | None":
    """Return a supported Python for this processor that can make a .venv; uv may install one."""
    places = [*os.get_exec_path(), str(Path.home() / ".local/bin"), "/opt/homebrew/bin"]
    uv = shutil.which("uv", path=os.pathsep.join(places))
    for version in SUPPORTED:
        framework = f"/Library/Frameworks/Python.framework/Versions/{version}/bin"
        folders = [*os.get_exec_path(), "/opt/homebrew/bin", "/usr/local/bin", framework]
        folders += map(str, Path.home().glob(f".pyenv/versions/{version}*/bin"))
        found = [os.path.join(folder, "python" + version) for folder in folders]
        found += [output_of([uv, "python", "find", "--system", version])] if uv else []
        for path in filter(os.path.isfile, found):
            words = output_of([path, "-c", PROBE]).split(" ", 2)  # a pyenv shim may print an error
            if words[:2] == [version, platform.machine()]:
                return words[2]
    if uv is None:
        return None
    say(f"No Python was found that can run Hearth; uv fetches Python {SUPPORTED[0]}.")
    subprocess.call([uv, "python", "install", SUPPORTED[0]])
    return output_of([uv, "python", "find", "--system", SUPPORTED[0]]) or None


def output_of(command: "list[str]") -> str:
    """Return the stripped output of `command`, or "" if it fails."""
    found = b""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.check_output(
            command,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=20,
        )
    return found.decode("utf-8", "replace").strip()


def change_interpreter(arguments: "list[str]") -> None:
    """Replace this process by a supported Python unless this is one; Stop if there is none."""
    if is_usable_here():
        return
    other = find_interpreter()
    if other is None:
        remedy = INSTALL_PYTHON.get(platform.system(), "uv python install 3.12")
        raise Stop(PYTHON_HELP.format(platform.python_version(), sys.executable, remedy))
    say(f"Python {platform.python_version()} can't run Hearth; going on with {other}.")
    os.execve(other, [other, str(PROJECT / "install_and_run.py"), *arguments], clean_environment())


def clean_environment() -> "dict[str, str]":
    return {name: text for name, text in os.environ.items() if name not in FOREIGN_VARIABLES}


def venv_version(venv: Path) -> "str | None":
    """Return the version of `venv`'s Python; None if it does not run or is another venv's."""
    version, _, prefix = output_of([str(venv / "bin/python"), "-c", VENV_PROBE]).partition(" ")
    return version if prefix and os.path.realpath(prefix) == os.path.realpath(venv) else None


def artefacts(venv: Path, version: "str | None", is_finished: bool) -> "list[str]":
    """Return one sentence per file in `venv` that belongs to another Python than `version`."""
    found = []
    python = venv / "bin/python"
    if version is None and (is_finished or (os.path.lexists(python) and not python.exists())):
        link = f", a link to {os.path.realpath(python)}," if os.path.islink(python) else ""
        found.append(f"bin/python{link} does not run in this .venv")
    if version is not None and version not in SUPPORTED:
        found.append(f"bin/python is Python {version}; supported are {', '.join(SUPPORTED)}")
    version = version or VERSION  # a venv without a Python gets this one
    for path in sorted([*venv.glob("bin/python*"), *venv.glob("lib/python*")]):
        named = re.match(r"python(\d+\.\d+)$", path.name)
        if named and named.group(1) != version:
            found.append(f"{path.relative_to(venv)} is not of Python {version}")
    configured = search_head(venv / "pyvenv.cfg", CONFIGURED)
    if configured not in (None, version):
        found.append(f"pyvenv.cfg says Python {configured}, and bin/python is {version}")
    for script in sorted(venv.glob("bin/pip*")):
        runs = search_head(script, SHEBANG)
        if runs and os.path.realpath(os.path.dirname(runs)) != os.path.realpath(venv / "bin"):
            found.append(f"bin/{script.name} runs {runs}")
    return found


def search_head(path: Path, pattern: str) -> "str | None":
    """Return the group that `pattern` matches in the head of the file `path`, or None."""
    found = None
    with contextlib.suppress(OSError):
        text = path.read_bytes()[:2000].decode("utf-8", "replace")
        found = re.search(pattern, text, re.MULTILINE)
    return next(filter(None, found.groups()), None) if found else None


def checked_version(venv: Path) -> "str | None":
    """Return the version of `venv`'s Python, or None if it is missing or half made.

    Raises:
        Stop: the .venv is contaminated by another Python.
    """
    if not venv.exists():
        return None
    version = venv_version(venv)
    found = artefacts(venv, version, is_finished=bool(read_stamp(venv).get("requirements")))
    if found:
        raise Stop(
            "{} is contaminated by another Python:\n  {}\nDelete it and run the same command "
            "again: rm -rf '{}'".format(venv, "\n  ".join(found), venv)
        )
    return version


def requirements(pyproject: Path, extras: "list[str]") -> "list[str]":
    """Return the dependencies in `pyproject`, with those of `extras`.

    An extra's requirement replaces a dependency on the same package: mlx[cpu] and mlx[cuda13] both
    contain mlx/lib/libmlx.so, and the one that pip unpacks last would win.
    """
    import tomllib

    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    added = [text for extra in extras for text in project["optional-dependencies"].get(extra, [])]
    replaced = set(map(package_and_marker, added))
    return [t for t in project["dependencies"] if package_and_marker(t) not in replaced] + added


def package_and_marker(requirement: str) -> "tuple[str, str]":
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()
    return name, requirement.partition(";")[2].strip()


def read_stamp(venv: Path) -> "dict[str, Any]":
    """Return the stamp of the last install; "requirements" are empty until the install ends."""
    try:
        found = json.loads((venv / "installed.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def wanted_stamp(venv: Path, extras: "list[str]", version: str) -> "dict[str, Any]":
    """Return the stamp for an install with `extras` and the extras of earlier installs.

    "vision" is included unless "no-vision" was requested; the latest request counts.
    """
    before = read_stamp(venv).get("extras")
    kept = {*(before if isinstance(before, list) else []), *extras}
    kept -= {"no-vision" if "vision" in extras else ""}
    kept = kept - {"vision"} if "no-vision" in kept else {*kept, "vision"}
    return {
        "python": version,
        "extras": sorted(kept),
        "requirements": requirements(PROJECT / "pyproject.toml", sorted(kept)),
        "project": str(PROJECT),
    }


def write_stamp(venv: Path, stamp: "dict[str, Any]") -> None:
    part = venv / "installed.json.part"
    part.write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    part.replace(venv / "installed.json")


def check_disk(venv: Path, needed: int) -> None:
    """Stop if the disk can't hold the install. Files already in `venv` need no more room."""
    needed -= sum(path.lstat().st_size for path in venv.rglob("*")) if venv.exists() else 0
    free = shutil.disk_usage(str(venv.parent)).free
    if free < needed:
        raise Stop(
            f"{free / 1e9:.1f} GB are free at {venv.parent}, and installing needs about "
            f"{needed / 1e9:.1f} GB. Free {(needed - free) / 1e9:.1f} GB, or move this directory "
            "to a larger disk."
        )


def prepare(venv: Path, extras: "list[str]") -> None:
    """Install into `venv` unless it is up to date."""
    if not is_current(venv, extras):
        with only_one(venv.parent) as lock:
            if not is_current(venv, extras):  # another install may have ended meanwhile
                install(venv, extras, lock)


def is_current(venv: Path, extras: "list[str]") -> bool:
    """Return whether `venv` is up to date and has all `extras`."""
    version = checked_version(venv)
    return version is not None and wanted_stamp(venv, extras, version) == read_stamp(venv)


@contextlib.contextmanager
def only_one(directory: Path) -> "Iterator[int]":
    """Lock `directory`, after waiting for another install there. Leaves no file behind."""
    lock = os.open(str(directory), os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"Another install is at work in {directory}; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def install(venv: Path, extras: "list[str]", lock: int) -> None:
    """Make `venv` or continue a half-made one, and install into it with pip."""
    if "cuda" in extras or not read_stamp(venv).get("requirements"):
        check_disk(venv, DISK_BYTES_CUDA if "cuda" in extras else DISK_BYTES)
    python = str(venv / "bin/python")
    pip = [python, "-m", "pip"]
    if venv_version(venv) is None or not output_of([*pip, "--version"]):
        say(f"Making {venv} with Python {VERSION}.")
        before = read_stamp(venv)  # holds the extras of earlier installs
        step([sys.executable, "-m", "venv", "--clear", str(venv)], lock)
        write_stamp(venv, {**before, "requirements": []})
    stamp = wanted_stamp(venv, extras, checked_version(venv) or VERSION)
    write_stamp(venv, {**stamp, "requirements": []})
    forget_half_installed(venv)
    if "cuda" in stamp["extras"] and list(venv.glob("lib/*/site-packages/mlx_cpu-*")):
        # Removing mlx-cpu deletes libmlx.so, which both packages share: both are installed anew.
        step([*pip, "uninstall", "--yes", "mlx-cpu", "mlx-cuda-13"], lock)
    fill = [*pip, "install", "--no-input", "--no-user", "--disable-pip-version-check"]
    step([*fill, *stamp["requirements"]], lock)
    step([*fill, "--no-deps", "--editable", str(PROJECT)], lock)
    write_stamp(venv, stamp)


def step(command: "list[str]", lock: int) -> None:
    """Run a command of an install. The command inherits `lock`, so that other installs wait for it.

    Raises:
        Stop: the command failed.
    """
    # Signals are blocked until `process` is assigned, so that the process can always be ended.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    process = subprocess.Popen(
        command,
        cwd=str(PROJECT),
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        pass_fds=[lock],
        preexec_fn=functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, ENDING),
    )
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        status = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S_MAX)
        process.kill()
        raise
    if status:
        raise Stop(
            f"Installing failed: `{' '.join(command[1:4])}` ended with status {status}, and says "
            "why above. It needs the network, or a mirror that pip knows (PIP_INDEX_URL). Run the "
            "same command again to go on from here."
        )


def forget_half_installed(venv: Path) -> None:
    """Remove half-unpacked packages of a killed pip, so that pip installs them again."""
    for info in venv.glob("lib/*/site-packages/*.dist-info"):
        if not (info / "INSTALLER").exists():  # pip writes it after the package's files
            shutil.rmtree(str(info))


def fetch_model(venv: Path) -> None:
    """Fetch the builtin model that MODEL_PATH names, unless a fetch was tried before.

    A failure is reported and does not end the install, which works without the model.
    """
    stamp, hearth = read_stamp(venv), [str(venv / "bin/python"), "-P"]
    is_settled = not {"model", "no-model"}.isdisjoint(stamp.get("extras", ()))
    model = "" if is_settled else output_of([*hearth, "-c", MODEL_PROBE])
    if model:
        with only_one(venv.parent) as lock:
            try:
                step([*hearth, "-m", "hearth.commands.main", "pull", model], lock)
            except Stop:
                say(
                    f"The install goes on without {model}, for the reason above. Fetch it later: "
                    f"'{venv}/bin/hearth' pull {model}"
                )
            stamp = read_stamp(venv)  # another install may have ended meanwhile
            write_stamp(venv, {**stamp, "extras": sorted([*stamp["extras"], "model"])})


def write_env(project: Path) -> None:
    """Copy .env.example to .env, readable by this user only, unless .env exists."""
    text = (project / ".env.example").read_bytes()
    try:
        handle = os.open(str(project / ".env"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(handle, "wb") as file:
        file.write(text)
    say(f"Wrote {project / '.env'}: the settings, at their defaults.")


def become(arguments: "list[str]", environ: "dict[str, str]") -> "NoReturn":
    """Replace this process by .venv's Python, which then gets signals and sets the exit status."""
    python = str(VENV / "bin/python")
    os.execve(python, [python, *arguments], environ)


def become_tests(arguments: "list[str]") -> "NoReturn":
    """Replace this process by the test suite or by pytest, with OpenBLAS for MLX on a CPU."""
    environ = clean_environment()
    openblas = runpy.run_path(str(PROJECT / "shared/linux_environment.py"))
    environ.update(openblas["openblas_environment"](environ))
    module = "tests.helpers.run_suite" if arguments in ([], ["all"], ["fast"]) else "pytest"
    os.chdir(str(PROJECT))
    become(["-m", module, *arguments], environ)


def parse(arguments: "list[str]") -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="install_and_run.py",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="X", help="hub id or directory of the model (MODEL_PATH)")
    add("--workers", metavar="N", help="workers to start (WORKERS)")
    add("--port", metavar="N", help="port to listen on (PROXY_PORT)")
    add("--check", action="store_true", help="install and check everything, start nothing")
    add = functools.partial(add, dest="extras", action="append_const", default=[])
    add("--cuda", const="cuda", help="use MLX for NVIDIA GPUs (Linux); .venv keeps it")
    add("--no-vision", const="no-vision", help="leave out what images take; .venv keeps it")
    add("--vision", const="vision", help="install it again after --no-vision")
    add("--no-model", const="no-model", help="fetch no model to begin with; .venv keeps it")
    return parser.parse_args(arguments)


def hearth_arguments(options: argparse.Namespace) -> "list[str]":
    """Return the `hearth` command for the options."""
    given = [("--model", options.model), ("--workers", options.workers), ("--port", options.port)]
    words = [word for name, text in given if text is not None for word in (name, text)]
    return ["check" if options.check else "serve", *words]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def on_signal(number: int, frame: object) -> None:
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)  # the exit takes at most END_S_MAX
    raise KeyboardInterrupt(number)


def run(arguments: "list[str]") -> "NoReturn":
    """Install, then replace this process by the program that `arguments` name."""
    is_test = arguments[:1] == ["test"]
    is_command = not is_test and arguments[:1] != [] and not arguments[0].startswith("-")
    options = parse([] if is_test or is_command else arguments)
    problem = platform_problem(platform.system(), platform.machine(), platform.mac_ver()[0])
    problem = problem or (cuda_problem() if "cuda" in options.extras else None)
    if problem:
        raise Stop(problem)
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # else: nohup or a background job
            signal.signal(number, on_signal)
    change_interpreter(arguments)
    # The tests need images too.
    prepare(VENV, ["dev", "vision"] if is_test else options.extras)
    if is_test:
        become_tests(arguments[1:])
    write_env(PROJECT)
    names_model = any(word.startswith("--model") for word in arguments)
    if not names_model and arguments[:1] not in (["run"], ["pull"]):
        fetch_model(VENV)
    # -P: nothing is imported from the user's directory.
    words = arguments if is_command else hearth_arguments(options)
    become(["-P", "-m", "hearth.commands.main", *words], clean_environment())


def main(arguments: "list[str]") -> int:
    try:
        run(arguments)
    except Stop as stop:
        say(str(stop))
        return 1
    except KeyboardInterrupt as interrupt:
        say("\nInterrupted. Run the same command again to go on from here.")
        return 128 + int(interrupt.args[0] if interrupt.args else signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
