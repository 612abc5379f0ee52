"""hearth run as a command: a chat in a real terminal, and answers in pipes, by real servers."""

import json
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hearth.commands.take_port import read_pid_file
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.processes import PID_FILE, process_started
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.by_day import by_day
from tests.helpers.clients.terminal import WAIT_S, Terminal, in_terminal, python_module
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.servers.server import Server, until
from tests.helpers.worker_processes.scripted_worker import DICTATION, FREEDOM

COMMAND = ("hearth.commands.main", "run")
READY = b"/help lists the commands"
FIGURES = b"(/why)"
PROMPT = b"\r\n> "  # before it Ctrl-D would be the terminal's own


def once(
    environ: Mapping[str, str], *arguments: str, piped: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        python_module(*COMMAND, *arguments),
        cwd=PROJECT_DIR,
        env=dict(environ),
        input=piped,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


@pytest.fixture
def chat(scripted: ScriptedServer) -> Iterator[Terminal]:
    """A chat with the scripted model."""
    with in_terminal(*COMMAND, environ=scripted.environment) as running:
        running.until(READY)
        yield running


def dictated(*turns: str) -> str:
    """Return a question that has the model write `turns`, one an answer."""
    return DICTATION + json.dumps(turns)


def test_a_chat_goes_on_with_what_is_kept_and_says_so(
    scripted: ScriptedServer, chat: Terminal
) -> None:
    chat.type(dictated("It is **one**.", "And two.") + "\r")
    at = chat.until(FIGURES)
    assert b"It is \x1b[1mone\x1b[0m." in chat.read
    chat.type("And then?\r")
    at = chat.until(FIGURES, at)
    first, second = scripted.asked()[-2:]
    assert second.session == first.session and first.session.startswith("chat-")
    assert second.ids[: len(first.ids) + len(first.sampled)] == first.ids + first.sampled
    assert second.cached >= len(first.ids)
    chat.type("/why\r")
    at = chat.until(f"hearth why {second.session} --base-url {scripted.url}".encode(), at)
    told = f"{len(second.ids)} tokens: {second.cached} were kept in a live cache"
    assert told.encode() in chat.read
    assert b"lost     nothing" in chat.read
    chat.until(PROMPT, at)
    chat.type("\x04")
    assert chat.wait() == 0
    assert b"Traceback" not in chat.read


def test_no_control_character_of_an_answer_reaches_the_terminal(chat: Terminal) -> None:
    chat.type(dictated("a\x1b]0;owned\x07b\x9b31mc\u202ed <b>tag</b>") + "\r")
    chat.until(FIGURES)
    assert b"a]0;ownedb31mcd <b>tag</b>" in chat.read
    assert b"\x1b]" not in chat.read and b"\x07" not in chat.read


def test_ctrl_c_stops_the_answer_at_the_server_too_and_the_chat_goes_on(
    scripted: ScriptedServer, chat: Terminal
) -> None:
    before = len(scripted.asked())
    chat.type(FREEDOM + "\r")
    until(lambda: len(scripted.asked()) > before)
    chat.type("\x03")
    at = chat.until(b"stopped")
    at = chat.until(PROMPT, at)  # until then another Ctrl-C still stops the answer
    scripted.wait_until_idle()
    chat.type("\x03")
    at = chat.until(b"Ctrl-D ends.", at)
    chat.type("/clear\r" + dictated("Still here.") + "\r")
    chat.until(b"Still here.", at)
    chat.until(FIGURES, at)


def test_typed_lines_are_in_no_file(scripted: ScriptedServer, tmp_path: Path) -> None:
    environ = scripted.environment | {"HOME": str(tmp_path)}
    with in_terminal(*COMMAND, environ=environ) as chat:
        chat.until(READY)
        chat.type("swordfish " + dictated("Yes.") + "\r")
        chat.until(PROMPT, chat.until(FIGURES))
        chat.type("\x04")
        assert chat.wait() == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if b"swordfish" in path.read_bytes()] == []


def test_a_pipe_is_answered_once_in_plain_text(scripted: ScriptedServer) -> None:
    environ = scripted.environment
    asked = once(environ, "", dictated("It is **one**.\x1b[2J\n"))
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, "It is **one**.[2J\n", "")
    asked = once(environ, "", dictated("Both."), piped="what was piped\n")
    assert (asked.returncode, asked.stdout) == (0, "Both.\n")
    assert '"Both."]\n\nwhat was piped<' in scripted.prompts()[-1]
    asked = once(environ, piped=dictated("Piped alone."))
    assert (asked.returncode, asked.stdout) == (0, "Piped alone.\n")
    asked = once(environ)
    assert (asked.returncode, asked.stdout) == (2, "") and "Nothing is asked." in asked.stderr


# ---------------------------------------------------------------- a server of its own


@pytest.fixture(scope="module")
def brief_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights whose answers come to an end: one token in eight ends a turn."""
    source, made = fixture_dir("qwen3"), tmp_path_factory.mktemp("brief")
    for file in source.iterdir():
        (made / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    (made / "config.json").unlink()
    ends = {"eos_token_id": list(range(0, config["vocab_size"], 8))}
    (made / "config.json").write_text(json.dumps(config | ends))
    return made


@pytest.fixture
def settings(tmp_path: Path, brief_model: Path) -> dict[str, str]:
    """The environment of a machine on which no server runs."""
    made = Server(
        MODEL_PATH=str(brief_model),
        PROXY_MODEL_ID="local",
        DEFAULT_TEMPERATURE="0",
        DEFAULT_THINKING="false",
        RUN_DIR=str(tmp_path / "run"),
        KV_CACHE_DIR=str(tmp_path / "kv"),
    )
    return made.environment


def children(settings: Mapping[str, str]) -> list[int]:
    """Return the pids of the server that runs on its port, and of its workers."""
    directory = Path(settings["RUN_DIR"]) / settings["PROXY_PORT"]
    supervisor, workers = read_pid_file(directory / PID_FILE)
    assert supervisor is not None and workers
    return [supervisor.pid, *(worker.pid for worker in workers)]


def test_a_server_is_started_where_none_runs_and_ends_with_the_chat(
    settings: dict[str, str],
) -> None:
    with in_terminal(*COMMAND, environ=settings) as chat:
        chat.until(READY)
        assert b"`hearth service install` keeps one running." in chat.read
        pids = children(settings)
        chat.type("Who are you?\r")
        chat.until(PROMPT, chat.until(FIGURES))
        found = once(settings, "local", "Who are you?")  # a second one asks the same server
        assert (found.returncode, found.stderr) == (0, "") and found.stdout.strip()
        chat.type("\x04")
        assert chat.wait() == 0
    assert all(process_started(pid) is None for pid in pids)


@pytest.mark.parametrize(
    "number", by_day([signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], [signal.SIGHUP])
)
def test_the_server_ends_however_the_chat_does(settings: dict[str, str], number: int) -> None:
    with in_terminal(*COMMAND, environ=settings) as chat:
        chat.until(READY)
        pids = children(settings)
        status = chat.end(number)
    assert status == (-number if number == signal.SIGKILL else 128 + number)
    until(lambda: all(process_started(pid) is None for pid in pids))


def test_a_start_that_fails_shows_the_end_of_its_log(
    settings: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    asked = once(settings, str(tmp_path), "Who?")
    assert (asked.returncode, asked.stdout) == (2, "")
    assert "did not start (exit status 78)" in asked.stderr
    assert "Hearth cannot start: " in asked.stderr
    asked = once(settings, "/no/such/model", "Who?")  # nothing is started with this
    assert (asked.returncode, asked.stdout) == (2, "")
    assert asked.stderr.startswith("MODEL is '/no/such/model', which is neither a directory nor")
