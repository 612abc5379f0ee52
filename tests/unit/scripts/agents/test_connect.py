"""`hearth connect` shows and writes its changes, and its undo gives every file back."""

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hearth.commands.agents import config_file, connect
from hearth.commands.agents.agent_setups import AGENTS
from hearth.commands.agents.config_file import Content
from hearth.commands.agents.config_values import ConfigError
from hearth.commands.server.find_or_start import RunningServer

KEY = "sk-secret-0123456789"
Command = Callable[..., int]

# Below HOME, what each agent's configuration is in.
PATHS = {
    "claude": (".claude/settings.json",),
    "codex": (".codex/config.toml",),
    "opencode": (".config/opencode/opencode.json",),
    "pi": (".pi/agent/models.json", ".pi/agent/settings.json"),
    "qwen": (".qwen/settings.json",),
    "openclaw": (".openclaw/openclaw.json",),
}
JSON = b'{\n    "env": {"X": "1"},\n    "model": "mine"\n}\n'
TEXTS = {
    "none": None,
    "empty": b"",
    "plain": JSON,
    "CRLF": JSON.replace(b"\n", b"\r\n"),
    "one line": b'{"env":{"ANTHROPIC_MODEL":"opus"},"defaultModel":"x"}',
    "byte order mark": b"\xef\xbb\xbf" + JSON,
}
COMMENTED = b"{ // mine\n  model: 'x', /* two */\n  provider: {other: {}},\n}\n"
TOML = b'# mine\nmodel = "gpt" # best\n\n[model_providers.x]\nname = "X"\n'
TOML_TEXTS = {**TEXTS, "plain": TOML, "CRLF": TOML.replace(b"\n", b"\r\n")}
TOML_TEXTS |= {"one line": b'model = "x"', "byte order mark": b"\xef\xbb\xbf" + TOML}
CASES = [
    (name, kind, text)
    for name in AGENTS
    for kind, text in (TOML_TEXTS if name == "codex" else TEXTS).items()
] + [(name, "commented", COMMENTED) for name in ("opencode", "qwen", "openclaw")]


class Home:
    """A home directory, and the commands in it."""

    def __init__(self, path: Path, patcher: pytest.MonkeyPatch) -> None:
        self.path = path
        self.key = ""
        self.context = 65_536
        self.port = 4_000
        (path / ".hearth").mkdir()
        for name in ("HOME", "XDG_CONFIG_HOME", "CODEX_HOME", "CLAUDE_CONFIG_DIR", "QWEN_HOME"):
            patcher.delenv(name, raising=False)
        patcher.setenv("HOME", str(path))
        patcher.setattr(connect, "HOME_DIR", path / ".hearth")
        patcher.setattr(connect, "find_or_start", self.find)

    @contextmanager
    def find(self, *_: Any) -> Iterator[RunningServer]:
        url = f"http://127.0.0.1:{self.port}"
        yield RunningServer(url, self.key, "m/x", self.context, False, False)

    def files(self) -> dict[str, tuple[int, bytes]]:
        return {
            str(path.relative_to(self.path)): (stat.S_IMODE(path.stat().st_mode), path.read_bytes())
            for path in self.path.rglob("*")
            if path.is_file()
        }

    def directories(self) -> set[Path]:
        return {path for path in self.path.rglob("*") if path.is_dir()}

    def write(self, name: str, data: bytes | None) -> Path:
        file = self.path / name
        if data is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            file.chmod(0o640)
        return file


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("PROXY_PORT", "4000")  # whatever whoever runs this has set
    return Home(tmp_path, monkeypatch)


@pytest.mark.parametrize("key", ["", KEY])
@pytest.mark.parametrize(("name", "kind", "text"), CASES, ids=[f"{n}-{k}" for n, k, _ in CASES])
def test_a_home_is_what_it_was_after_connect_and_undo(
    name: str, kind: str, text: bytes | None, key: str, home: Home
) -> None:
    home.key = key
    for path in PATHS[name]:
        home.write(path, text)
    before, directories = home.files(), home.directories()
    assert connect.main([name, "--yes"]) == 0
    during = home.files()
    assert all(b"4000" in during[path][1] for path in PATHS[name][:1])
    assert all(during[path] != before.get(path) for path in PATHS[name])
    holders = [mode for mode, data in during.values() if KEY.encode() in data]
    assert holders == [0o600] * len(holders) and bool(holders) == bool(key)
    assert connect.main([name, "--yes"]) == 0  # once more changes nothing
    assert home.files() == during
    assert connect.main([name, "--undo", "--yes"]) == 0
    assert (home.files(), home.directories()) == (before, directories)


def test_a_second_connect_with_other_facts_is_undone_to_what_was_there_first(home: Home) -> None:
    home.write(".codex/config.toml", TOML)
    before = home.files()
    assert connect.main(["codex", "--yes"]) == 0
    home.context = 8_192
    assert connect.main(["codex", "--yes"]) == 0
    text = home.files()[".codex/config.toml"][1].decode()
    assert "8192" in text and "65536" not in text
    assert connect.main(["codex", "--undo", "--yes"]) == 0
    assert home.files() == before


@pytest.mark.parametrize("name", AGENTS)
def test_what_the_user_writes_later_is_kept_by_an_undo(
    name: str, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    path = PATHS[name][0]
    text = TOML if name == "codex" else JSON
    file = home.write(path, text)
    assert connect.main([name, "--yes"]) == 0
    if name == "codex":
        file.write_bytes(file.read_bytes() + b"\n[later]\nx = 1\n")
    else:  # as an agent that writes the file anew does
        file.write_text(json.dumps({"later": 1, **json.loads(file.read_text())}))
    assert connect.main([name, "--undo", "--yes"]) == 0
    values = config_file.parsed(file, "toml" if name == "codex" else "json", file.read_text())
    later = values.pop("later")
    first = config_file.parsed(file, "toml" if name == "codex" else "json", text.decode())
    assert (later, values) == ({"x": 1} if name == "codex" else 1, first)
    assert "stays as it is" not in capsys.readouterr().out


class Killed(BaseException):
    """As kill -9 ends a process: nothing of it goes on."""


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("name", AGENTS)
def test_a_connect_that_is_killed_at_any_write_is_undone(
    name: str, number: int, is_written: bool, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in PATHS[name]:
        home.write(path, TOML if name == "codex" else JSON)
    before = home.files()
    assert connect.main([name, "--yes"]) == 0
    write, written = config_file.write, []

    def killed(path: Path, content: Content) -> None:
        written.append(path)
        if len(written) < number or is_written:
            write(path, content)
        if len(written) == number:
            raise Killed

    home.context, home.key = 8_192, KEY
    with monkeypatch.context() as patcher, contextlib.suppress(Killed):
        patcher.setattr(config_file, "write", killed)
        connect.main([name, "--yes"])
    assert len(written) == number or (name == "qwen" and number == 3)
    assert connect.main([name, "--undo", "--yes"]) == 0
    assert home.files() == before


def test_another_programs_port_is_written_nowhere(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    home.port = 4_001  # where a server was started, as 4000 is taken
    assert connect.main(["claude", "--yes"]) == 2
    assert "another program has port 4000" in capsys.readouterr().err
    assert home.files() == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"mode": 384', '"mode": null'),
        ('"syntax": "toml"', '"syntax": "yaml"'),
        ('"before": null', '"before": 7'),
        ('"depth": 0', '"depth": "0"'),
        ('"entries": [', '"entries": [0,'),
        ('"directories": [', '"directories": [0,'),
        ('{\n "format"', "[" * 100_000),
        ('{\n "format"', "\xff"),
    ],
)
def test_a_damaged_record_is_named_and_nothing_is_written(
    old: str, new: str, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert connect.main(["codex", "--yes"]) == 0
    record = home.path / ".hearth/connect/codex/record.json"
    assert old in record.read_text()
    record.write_bytes(record.read_text().replace(old, new).encode("latin-1"))
    during = home.files()
    for arguments in (["codex", "--yes"], ["codex", "--undo", "--yes"]):
        assert connect.main(arguments) == 2
        assert f"{record} cannot be read" in capsys.readouterr().err
    assert home.files() == during


def test_a_file_that_cannot_be_edited_rightly_is_not_called_wrong(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    home.write(".codex/config.toml", b"model_providers = {hearth = {name = 'x'}}\n")
    assert connect.main(["codex", "--yes"]) == 2
    assert "is written in a way that cannot be edited" in capsys.readouterr().err


def test_a_value_of_ours_that_the_user_changed_stays_and_is_named(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home.write(".claude/settings.json", b"{}")
    assert connect.main(["claude", "--yes"]) == 0
    values = json.loads(file.read_text())
    values["env"]["ANTHROPIC_MODEL"] = "another"
    file.write_text(json.dumps(values))
    assert connect.main(["claude", "--undo", "--yes"]) == 0
    assert json.loads(file.read_text()) == {"env": {"ANTHROPIC_MODEL": "another"}}
    assert "env.ANTHROPIC_MODEL was changed since" in capsys.readouterr().out


def test_a_link_stays_a_link_to_the_file_that_is_edited(home: Home) -> None:
    real = home.write("dotfiles/claude.json", JSON)
    link = home.path / ".claude/settings.json"
    link.parent.mkdir()
    link.symlink_to(real)
    assert connect.main(["claude", "--yes"]) == 0
    assert link.is_symlink() and b"4000" in real.read_bytes()
    assert connect.main(["claude", "--undo", "--yes"]) == 0
    assert link.is_symlink() and real.read_bytes() == JSON


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (lambda file: file.chmod(0o440), "is read-only"),
        (lambda file: file.write_bytes(b"{ // mine\n}"), "cannot be edited"),
        (lambda file: file.write_bytes(b"\xff{}"), "no UTF-8"),
        (lambda file: file.write_bytes(b"[]"), "cannot be edited"),
        (lambda file: (file.unlink(), file.mkdir()), "cannot be read"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "is a pipe"),
        (lambda file: file.write_bytes(b" " * 4_000_001), "larger than 4,000,000"),
    ],
)
def test_a_file_that_cannot_be_edited_is_named_and_nothing_is_written(
    prepare: Callable[[Path], Any], told: str, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home.write(".claude/settings.json", JSON)
    prepare(file)
    before = home.files()
    assert connect.main(["claude", "--yes"]) == 2
    said = capsys.readouterr().err
    assert told in said and "settings.json" in said
    assert home.files() == before


def test_the_diff_is_shown_without_the_key_and_a_no_writes_nothing(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home.key = KEY
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert connect.main(["qwen"]) == 1
    said = capsys.readouterr().out
    assert '+    "HEARTH_KEY": "<the server\'s key>"' in said
    assert "only you can read" in said and KEY not in said
    assert home.files() == {}


@pytest.mark.parametrize("name", AGENTS)
def test_no_diff_shows_a_key_of_the_server_also_not_one_of_before(
    name: str, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    home.key = KEY
    assert connect.main([name, "--yes"]) == 0
    home.key, home.context = "sk-another-key-9876", 8_192
    assert connect.main([name, "--yes"]) == 0
    home.key = ""
    assert connect.main([name, "--undo", "--yes"]) == 0
    said = capsys.readouterr().out
    assert KEY not in said and "sk-another" not in said


def test_ctrl_d_at_the_question_is_a_no(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", ended)
    assert connect.main(["codex"]) == 1
    assert home.files() == {}


def test_without_a_terminal_nothing_is_written_unless_it_is_asked_for(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    assert connect.main(["pi"]) == 2
    assert "Add --yes" in capsys.readouterr().err
    assert home.files() == {}


def test_where_one_file_cannot_be_written_none_is(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write(".pi/agent/models.json", JSON)
    before = home.files()
    write = config_file.write

    def full(path: Path, content: Content) -> None:
        if path.name == "settings.json" and content.data:
            raise ConfigError("No space left on device")
        write(path, content)

    monkeypatch.setattr(config_file, "write", full)
    assert connect.main(["pi", "--yes"]) == 2
    after = home.files()
    assert {name: after[name] for name in before} == before
    monkeypatch.undo()


def test_there_is_nothing_to_undo_where_nothing_was_connected(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert connect.main(["codex", "--undo", "--yes"]) == 0
    assert "nothing to undo" in capsys.readouterr().out
    assert os.listdir(home.path) == [".hearth"]
