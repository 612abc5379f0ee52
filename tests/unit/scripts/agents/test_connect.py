"""`hearth connect` prints what to put where and what to take out, and writes nothing."""

import json
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hearth.commands.agents import connect
from hearth.commands.agents.agent_setups import AGENTS
from hearth.commands.server.find_or_start import RunningServer
from tests.helpers.clients.printed_setup import texts_in

KEY = "sk-secret-0123456789"
Connect = Callable[..., str]


@pytest.fixture
def connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Connect:
    """Return what gives the words of `hearth connect`, which leaves every file as it is."""
    for name in ("XDG_CONFIG_HOME", "CODEX_HOME", "CLAUDE_CONFIG_DIR", "QWEN_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PROXY_PORT", "4000")  # whatever whoever runs this has set
    monkeypatch.setattr(connect, "HOME_DIR", tmp_path / ".hearth")

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def run(name: str, status: int = 0, *, key: str = "", port: int = 4_000) -> str:
        @contextmanager
        def find(*_: Any, **__: Any) -> Iterator[RunningServer]:
            yield RunningServer(f"http://127.0.0.1:{port}", key, "m/x", 65_536, False, False)

        monkeypatch.setattr(connect, "find_or_start", find)
        before = files()
        assert connect.main([name]) == status
        assert files() == before
        told = capsys.readouterr()
        return told.err if status else told.out

    return run


@pytest.mark.parametrize("key", ["", KEY])
@pytest.mark.parametrize("name", AGENTS)
def test_what_is_printed_is_whole_and_has_no_key(
    name: str, key: str, connected: Connect, tmp_path: Path
) -> None:
    said = connected(name, key=key)
    texts = texts_in(said)
    for path, text in texts.items():
        (tomllib if path.suffix == ".toml" else json).loads(text)
        assert path.is_relative_to(tmp_path) and f"Put into {path}:" in said
    everything = "".join(texts.values())
    assert "127.0.0.1:4000" in everything and "m/x" in everything and "65536" in everything
    assert KEY not in said
    assert (f"export {AGENTS[name].key_variable}=YOUR_KEY" in said) == bool(key)


def test_a_file_that_is_there_is_merged_with_a_remark(connected: Connect, tmp_path: Path) -> None:
    file = tmp_path / ".config/opencode/opencode.jsonc"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    said = connected("opencode")
    assert f"Merge into {file}:" in said and '"enabled_providers"' in said


def test_another_programs_port_is_told(connected: Connect) -> None:
    # A server is started at 4001 where 4000 is taken.
    assert "Another program has port 4000" in connected("claude", 2, port=4_001)
