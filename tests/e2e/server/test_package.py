"""The wheel: what is in it, and that a server runs from it alone, in an empty directory."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.commands.accuracy.question_file import SHIPPED
from hearth.shared.linux_environment import openblas_environment
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.version import VERSION
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import Server

pytestmark = pytest.mark.night  # builds with setuptools, which pip fetches
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "proxy", "worker", "shared", "scripts")
BUILD_S_MAX = 300  # setuptools is fetched


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built in a copy: a build leaves folders behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        path = PROJECT_DIR / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", out, source]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=BUILD_S_MAX)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel's content, as site-packages has it."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, wheel]
    subprocess.run(pip, check=True, capture_output=True, timeout=BUILD_S_MAX)
    return target


@pytest.fixture
def environ(site: Path) -> Iterator[dict[str, str]]:
    """The environment of a user who has the install alone; PYTHONPATH wins over a checkout."""
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="hearth-") as home:  # a socket's path has a limit
        found = {**kept, "HOME": home, "PYTHONPATH": str(site)}
        found["MODEL_PATH"] = str(fixture_dir("qwen3"))
        yield {**found, **openblas_environment(found)}


def hearth(site: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(site / "bin" / "hearth"), *arguments]


def test_the_wheel_holds_hearth_alone_with_questions_and_pages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"hearth_llm-{VERSION}.dist-info"
    assert {name.split("/")[0] for name in names} == {"hearth", info}
    folders = {name.split("/")[1] for name in names if name.startswith("hearth/")}
    assert folders == {"commands", "proxy", "shared", "worker"}
    pages = "hearth/proxy/monitoring/pages"
    assert {f"{pages}/index.html", f"{pages}/vendor/uPlot.iife.min.js"} < names
    assert {f"hearth/commands/accuracy/{SHIPPED.name}", f"{info}/licenses/LICENSE"} < names


def test_a_server_from_the_wheel_answers_logs_at_home_and_imports_nothing_from_here(
    site: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    for trap in ("hearth", "proxy", "worker", "shared", "types", "asyncio", "mlx"):
        text = "raise SystemExit('imported from the user directory')\n"
        (tmp_path / f"{trap}.py").write_text(text)
    server, home = Server(), Path(environ["HOME"]) / ".hearth"
    home.mkdir(exist_ok=True)
    (home / ".env").write_text(f"PROXY_PORT={server.port}\n")
    (tmp_path / ".env").write_text("PROXY_PORT=1\nMODEL_PATH=/nowhere\n")  # anybody's project
    server.environment = environ
    command = hearth(site, "serve")[1:]
    server.start("-c", f"import os, sys; os.chdir({str(tmp_path)!r}); os.execv(sys.executable, "
                       f"[sys.executable, *{command!r}])")  # fmt: skip
    with server.ready():
        name = fixture_dir("qwen3").name
        with server.openai() as client:
            answer = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "Hello"}], max_tokens=8
            )
        assert answer.usage is not None and answer.usage.completion_tokens > 0
        why = hearth(site, "why", "--base-url", server.url)
        listed = subprocess.run(why, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert listed.returncode == 0 and name in listed.stdout
        server.stop(signal.SIGINT)
        assert list((home / "logs").rglob("*.log"))
        assert "cannot" not in server.log.read_text()
