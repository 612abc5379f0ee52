"""A server is installed whole or not at all, and what cannot be installed says why."""

from pathlib import Path

import pytest

from hearth.commands.bench.server import Server
from hearth.commands.bench.servers import install_server
from hearth.commands.bench.servers.install_server import (
    InstallError,
    install,
    install_bytes,
    is_installed,
    program_of,
    told_version,
)

pytestmark = pytest.mark.process
SOME = Server("some", package="some==1")


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where a stand-in for uv is to be written."""
    monkeypatch.setattr(install_server, "ENVIRONMENTS_DIR", tmp_path)
    uv = tmp_path / "uv" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text("#!/bin/sh\necho no network >&2; exit 3\n")
    uv.chmod(0o700)
    return uv


def test_what_packages_run_while_they_are_built_sees_no_key(
    uv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("https_proxy", "http://proxy")
    monkeypatch.setenv("UV_INDEX_URL", "http://mirror")
    uv.write_text('#!/bin/sh\necho "$https_proxy $OPENAI_API_KEY $HF_TOKEN" >&2; exit 3\n')
    with pytest.raises(InstallError) as caught:
        install(SOME)
    assert "secret" not in str(caught.value)
    kept = install_server.installer_environment({"HF_TOKEN": "s", "UV_INDEX_URL": "m", "PATH": "/"})
    assert kept == {"UV_INDEX_URL": "m", "PATH": "/"}
    assert "http://proxy" in str(caught.value)


def test_a_failed_installation_says_what_was_said(
    uv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InstallError, match="some==1 cannot be installed: no network"):
        install(SOME)
    assert not is_installed(SOME) and install_bytes(SOME) > 0
    uv.unlink()
    monkeypatch.setattr(install_server.venv, "create", lambda *_, **__: None)
    with pytest.raises(InstallError, match="pip"):
        install(SOME)


def test_an_environment_appears_when_it_is_whole_and_is_made_once(uv: Path, tmp_path: Path) -> None:
    script = (
        '#!/bin/sh\necho "$@" >> "$(dirname "$0")/log"\n'
        '[ "$1" = venv ] && mkdir -p "$5/bin" && touch "$5/bin/python"; exit 0\n'
    )
    uv.write_text(script)
    install(SOME)
    assert program_of(SOME) == str(tmp_path / "some==1" / "bin" / "python")
    assert is_installed(SOME) and install_bytes(SOME) == 0
    assert "torch ;" in (tmp_path / "uv" / "override.txt").read_text()
    install(SOME)
    assert len((uv.parent / "log").read_text().splitlines()) == 2, "venv, install"
    needing = Server("mlx-openai-server", package="other==2")
    install(needing)
    assert "torch ;" not in (tmp_path / "uv" / "override.txt").read_text()
    assert "torch" in (uv.parent / "log").read_text().splitlines()[-1].split()


def test_an_executable_is_its_owners_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Server("absent", program="no-such-program-of-hearth")
    assert program_of(absent) is None and not is_installed(absent)
    with pytest.raises(InstallError, match="there is no no-such-program-of-hearth on PATH"):
        install(absent)
    monkeypatch.setattr(install_server.sys, "platform", "linux")
    with pytest.raises(InstallError, match="mtplx is not installed: it needs a Mac"):
        install(Server("mtplx", package="mtplx==0"))
    assert is_installed(Server("url", url="http://127.0.0.1:1"))


def test_versions_are_those_of_the_environment(uv: Path, tmp_path: Path) -> None:
    found = tmp_path / "some==1" / "lib" / "python3.11" / "site-packages" / "mlx_lm-9.8.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-lm\nVersion: 9.8\n")
    assert told_version(SOME) == "some 1, mlx-lm 9.8"
    assert told_version(Server("mlx_lm")).startswith("mlx-lm ")
    assert told_version(Server("hearth")).startswith("hearth-llm ")
    assert told_version(Server("x", url="http://127.0.0.1:1")) == "not known"
