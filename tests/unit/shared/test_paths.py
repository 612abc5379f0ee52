"""Settings and logs are found in a checkout and in an install, from any working directory."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hearth.shared import paths
from hearth.shared.paths import PROJECT_DIR

pytestmark = pytest.mark.process

REPORT = """
import json, os
from hearth.shared import paths
from hearth.shared.settings import load_settings
found = load_settings(os.environ, paths.env_file())
print(json.dumps({"code": str(paths.CODE_DIR), "project": str(paths.PROJECT_DIR),
                  "env": str(paths.env_file()), "logs": str(found.log_root),
                  "port": found.proxy_port, "run": str(found.run_dir)}))
"""


@pytest.fixture
def install(tmp_path: Path) -> Path:
    """What site-packages holds of an install that these settings need."""
    site = tmp_path / "site"
    shutil.copytree(PROJECT_DIR / "shared", site / "hearth" / "shared")
    return site


def report(site: Path, home: Path, here: Path, **given: str) -> dict[str, Any]:
    """Return what a process sees that was started in `here` by the user whose home is `home`."""
    home.mkdir(exist_ok=True)
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(site), **given}
    done = subprocess.run(
        [sys.executable, "-P", "-c", REPORT], cwd=here, env=environ, capture_output=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_install_reads_env_in_the_home_directory_and_none_of_a_project(
    install: Path, tmp_path: Path
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    here.mkdir()
    bare = report(install, home, here)
    assert bare["code"] == str(install / "hearth") and bare["port"] == 4000
    (home / ".hearth").mkdir()
    (home / ".hearth" / ".env").write_text("PROXY_PORT=4444\n")
    assert report(install, home, here)["port"] == 4444
    (here / ".env").write_text("PROXY_HOST=evil.example\nPROXY_PORT=80\n")
    assert report(install, home, here)["port"] == 4444
    assert report(install, home, here, PROXY_PORT="4555")["port"] == 4555


def test_a_checkout_is_the_same_from_any_working_directory(tmp_path: Path) -> None:
    found = report(PROJECT_DIR / ".ci" / "types", tmp_path / "home", tmp_path, RUN_DIR="run")
    assert found["project"] == found["code"] == str(PROJECT_DIR)
    assert found["env"] == str(PROJECT_DIR / ".env")
    assert found["run"] == str(PROJECT_DIR / "run")
    assert found["logs"] == str(tmp_path / "home" / ".hearth" / "logs"), "a checkout may be synced"


@pytest.mark.parametrize(
    ("home", "text", "shown"),
    [
        ("/home/ann", "in /home/ann/x, file:///home/ann and /home/ann.", "in ~/x, file://~ and ~."),
        ("/home/ann", "/home/anna/x, /data/home/ann-2", "/home/anna/x, /data/home/ann-2"),
        ("/home/Jörg Ñ", "cannot read /home/Jörg Ñ/x", "cannot read ~/x"),
        ("/", "no /etc/x", "no /etc/x"),
    ],
)
def test_home_is_shown_as_a_tilde_and_no_other_place_is(
    home: str, text: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", home)
    assert paths.without_home(text) == shown
