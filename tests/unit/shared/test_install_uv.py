"""The install command: a Python that uv fetches."""

import os
import re
import sys
from pathlib import Path

import pytest

import install_and_run
from install_and_run import PROJECT, VERSION, Stop

pytestmark = pytest.mark.process

BASE_PYTHON = Path(sys.base_prefix, "bin", f"python{VERSION}")
FAKE_UV = """#!/bin/sh
echo "$@" >> {calls}
case "$2" in
  install) {install} ;;
  find) test "$4" = {version} && test -e {python} && echo {python} ;;
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
    write_tool(tmp_path / ".local" / "bin" / "uv", FAKE_UV.format(version=VERSION, **words))
    monkeypatch.setattr(install_and_run, "SUPPORTED", (VERSION,))
    monkeypatch.setattr(install_and_run, "is_usable_here", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
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


def test_the_supported_versions_are_those_of_the_package() -> None:
    text = (PROJECT / "pyproject.toml").read_text()
    named = re.findall(r"Python :: (3\.\d+)", text)
    assert sorted(install_and_run.SUPPORTED) == named
    assert 'requires-python = ">=3.11,<3.14"' in text
