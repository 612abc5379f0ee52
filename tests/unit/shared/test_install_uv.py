"""The install command: a Python that uv fetches, and what it does for `hearth service`."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import NoReturn

import pytest

import install_and_run
from install_and_run import PROJECT, VERSION, Stop

pytestmark = pytest.mark.process

BASE_PYTHON = Path(sys.base_prefix, "bin", f"python{VERSION}")
FAKE_UV = """#!/bin/sh
echo "$@" >> {calls}
case "$2" in
  install) {install} ;;
  find) test "$3" = {version} && test -e {python} && echo {python} ;;
esac
"""


def write_tool(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize("can_fetch", [True, False])
def test_uv_fetches_a_python_where_none_is_found(
    can_fetch: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    python, calls = tmp_path / "uv" / f"python{VERSION}", tmp_path / "calls"
    if Path("/usr/local/bin", f"python{VERSION}").exists():
        pytest.skip("a supported Python is in /usr/local/bin, which is always searched")
    made = f"/bin/mkdir {python.parent} && /bin/ln -s {BASE_PYTHON} {python}"
    words = {"calls": calls, "install": made if can_fetch else "exit 2", "python": python}
    write_tool(tmp_path / "uv.sh", FAKE_UV.format(version=VERSION, **words))
    monkeypatch.setattr(install_and_run, "SUPPORTED", (VERSION,))
    monkeypatch.setattr(install_and_run, "find_uv", lambda environ: str(tmp_path / "uv.sh"))
    monkeypatch.setattr(install_and_run, "is_usable_here", lambda: False)
    monkeypatch.setattr(install_and_run, "clean_environment", lambda: {"PATH": str(tmp_path)})
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda path, words, environ: became.append(words))
    if can_fetch:
        install_and_run.change_interpreter(["--check"])
        ((found, *rest),) = became
        assert os.path.samefile(found, BASE_PYTHON)
        assert rest == [str(PROJECT / "install_and_run.py"), "--check"]
        install_and_run.change_interpreter([])  # a second start finds it
    else:
        with pytest.raises(Stop, match="run the same command again"):
            install_and_run.change_interpreter([])
    assert calls.read_text().splitlines().count(f"python install {VERSION}") == 1
    assert capfd.readouterr().err.count(f"uv fetches Python {VERSION}") == 1


def test_uv_is_found_where_its_installer_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert install_and_run.find_uv({"PATH": ""}) is None
    uv = tmp_path / ".local" / "bin" / "uv"
    write_tool(uv, "")
    assert install_and_run.find_uv({"PATH": "/bin"}) == str(uv)


def test_the_supported_versions_are_those_of_the_package() -> None:
    text = (PROJECT / "pyproject.toml").read_text()
    named = re.findall(r"Python :: (3\.\d+)", text)
    assert sorted(install_and_run.SUPPORTED) == named
    assert 'requires-python = ">=3.11,<3.14"' in text


@pytest.mark.parametrize(
    "words",
    [["service", "logs", "-n", "3"], ["launch", "claude", "--model", "x", "--", "-p", "hi"]],
    ids=["service", "launch"],
)
def test_commands_install_what_is_missing_and_go_on_as_hearth_where_the_user_is(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[list[str]] = []
    became: list[tuple[list[str], Path]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(install_and_run, "VENV", tmp_path)
    monkeypatch.setattr(install_and_run, "prepare", lambda _, extras: prepared.append(extras))
    monkeypatch.setattr(install_and_run, "write_env", lambda project: None)

    def become(command: list[str], environ: dict[str, str], directory: Path) -> NoReturn:
        became.append((command, directory))
        raise Stop("became", 0)

    monkeypatch.setattr(install_and_run, "become", become)
    monkeypatch.setattr(install_and_run, "is_usable_here", lambda: True)
    monkeypatch.setattr(install_and_run.signal, "getsignal", lambda number: signal.SIG_IGN)
    assert install_and_run.main(words) == 0
    hearth = [str(tmp_path / "bin/python"), "-P", "-m", "hearth.commands.main"]
    assert (prepared, became) == ([[]], [([*hearth, *words], tmp_path)])


def test_a_word_that_is_no_command_installs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared: list[list[str]] = []
    monkeypatch.setattr(install_and_run, "prepare", lambda _, extras: prepared.append(extras))
    monkeypatch.setattr(install_and_run, "is_usable_here", lambda: True)
    monkeypatch.setattr(install_and_run.signal, "getsignal", lambda number: signal.SIG_IGN)
    with pytest.raises(SystemExit, match="2"):
        install_and_run.main(["rnu", "qwen3.5-9b"])
    assert "invalid choice: 'rnu'" in capsys.readouterr().err and prepared == []
