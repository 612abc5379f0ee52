"""`hearth connect` prints what to put where and what to take out, and writes nothing."""

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hearth.commands.agents import connect
from hearth.commands.agents.agent_setups import AGENTS
from hearth.commands.server.find_or_start import RunningServer
from tests.helpers.clients.printed_setup import texts_in

KEY = "sk-secret-0123456789"
# As the earlier version kept it, of a user who had `model = "gpt"  # best`.
RECORD = {
    "format": 1,
    "files": [
        {
            "path": "HOME/.codex/config.toml",
            "syntax": "toml",
            "before": "bW9kZWwgPSAiZ3B0IiAgIyBiZXN0Cg==",
            "mode": 420,
            "after_sha256": "",
            "found_sha256": "",
            "entries": [
                {"keys": ["model_provider"], "value": "hearth", "depth": 0, "before": None},
                {"keys": ["model"], "value": "m/x", "depth": 1, "before": '"gpt"  # best'},
                {
                    "keys": ["model_providers", "hearth"],
                    "value": {"name": "Hearth", "wire_api": "responses"},
                    "depth": 1,
                    "before": None,
                },
            ],
            "directories": [],
        }
    ],
}
WRITTEN = """\
model_provider = "hearth"
model = "m/x"

[model_providers.hearth]
name = "Hearth"
wire_api = "responses"
"""


class Home:
    """A home directory, a server that runs, and what is printed there."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self.capsys = capsys
        self.key = ""
        self.port = 4_000
        self.is_ours = False

    @contextmanager
    def find(self, *_: Any, **__: Any) -> Iterator[RunningServer]:
        url = f"http://127.0.0.1:{self.port}"
        yield RunningServer(url, self.key, "m/x", 65_536, False, self.is_ours)

    def connect(self, name: str, status: int = 0) -> str:
        """Return what `hearth connect` prints, which leaves every file as it is."""
        before = self.files()
        assert connect.main([name]) == status
        assert self.files() == before
        told = self.capsys.readouterr()
        return told.err if status else told.out

    def files(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.path.rglob("*") if path.is_file()}

    def write(self, name: str, text: str) -> Path:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def write_record(self) -> Path:
        text = json.dumps(RECORD).replace("HOME", str(self.path))
        return self.write(".hearth/connect/codex/record.json", text)


@pytest.fixture
def home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Home:
    made = Home(tmp_path, capsys)
    for name in ("XDG_CONFIG_HOME", "CODEX_HOME", "CLAUDE_CONFIG_DIR", "QWEN_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PROXY_PORT", "4000")  # whatever whoever runs this has set
    monkeypatch.setattr(connect, "HOME_DIR", tmp_path / ".hearth")
    monkeypatch.setattr(connect, "find_or_start", made.find)
    return made


@pytest.mark.parametrize("key", ["", KEY])
@pytest.mark.parametrize("name", AGENTS)
def test_what_is_printed_is_whole_and_has_no_key(name: str, key: str, home: Home) -> None:
    home.key = key
    said = home.connect(name)
    texts = texts_in(said)
    for path, text in texts.items():
        (tomllib if path.suffix == ".toml" else json).loads(text)
        assert path.is_relative_to(home.path) and f"Put into {path}:" in said
    everything = "".join(texts.values())
    assert "127.0.0.1:4000" in everything and "m/x" in everything and "65536" in everything
    assert KEY not in said
    assert (f"export {AGENTS[name].key_variable}=YOUR_KEY" in said) == bool(key)


def test_a_file_that_is_there_is_merged_with_a_remark(home: Home) -> None:
    assert "enabled_providers" not in home.connect("opencode")
    file = home.write(".config/opencode/opencode.jsonc", "{}")
    said = home.connect("opencode")
    assert f"Merge into {file}:" in said and '"enabled_providers"' in said


# ---------------------------------------------------------------- what an earlier version wrote


def test_what_an_earlier_version_wrote_and_still_stands_is_to_be_taken_out(home: Home) -> None:
    record, file = home.write_record(), home.write(".codex/config.toml", WRITTEN)
    said = home.connect("codex")
    assert f"  {file}: model_provider\n" in said
    assert f'  {file}: model (it was "gpt"  # best)\n' in said
    assert f"  {file}: model_providers.hearth\n" in said
    assert f"the directory {record.parent}" in said
    file.write_text(WRITTEN.replace("m/x", "another"))  # its user's own wish since
    said = home.connect("codex")
    assert f"{file}: model_provider\n" in said and f"{file}: model (" not in said
    file.unlink()
    assert f"{file}: model" not in home.connect("codex")


# ---------------------------------------------------------------- servers


def test_another_programs_port_is_told(home: Home) -> None:
    home.port = 4_001  # where a server was started, as 4000 is taken
    assert "Another program has port 4000" in home.connect("claude", status=2)
