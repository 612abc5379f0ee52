"""hearth top as a command, against the real server and in a real terminal."""

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from hearth.shared.settings_from_env import PROJECT_DIR
from tests.helpers.clients.terminal import COLUMNS, WAIT_S, Terminal, in_terminal, python_module
from tests.helpers.servers.server import Server, free_port

COMMAND = ("hearth.commands.top", "--base-url")
ALTERNATE_SCREEN, MAIN_SCREEN, SHOW_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


def printed(url: str, *arguments: str) -> tuple[int, str]:
    """Return the exit status, and what was printed for 80 columns."""
    done = subprocess.run(
        python_module(*COMMAND, url, *arguments),
        cwd=PROJECT_DIR,
        env={**os.environ, "COLUMNS": str(COLUMNS)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    return done.returncode, done.stdout + done.stderr


def asked(server: Server, session: str) -> int:
    """Send one short request; return its prompt's tokens."""
    with server.openai() as client:
        answer = client.chat.completions.create(
            model="local",
            messages=[{"role": "user", "content": f"{session}?"}],
            max_tokens=4,
            extra_headers={"x-session-id": session},
        )
    assert answer.usage is not None
    return answer.usage.prompt_tokens


def test_once_prints_workers_cache_and_the_last_request(server: Server) -> None:
    prompt = asked(server, "seen-by-top")
    for arguments in (("--once",), ()):  # where the output is no terminal it is always once
        status, text = printed(server.url, *arguments)
        assert status == 0, text
        lines = text.splitlines()
        assert lines[0].startswith("hearth ") and server.url in lines[0] and "  ok  " in lines[0]
        assert lines[2].split()[:3] == ["0", "ready", "local"]
        (last,) = [line.split() for line in lines if " seen-by-" in line]
        assert (int(last[2]), int(last[3]) + int(last[4])) == (prompt, prompt)
        assert any(line.startswith("seen-by-top") for line in lines)
        (totals,) = [line for line in lines if line.startswith("hit rate ")]
        assert " in 0 requests" not in totals
        assert max(map(len, lines)) <= COLUMNS
        assert "\x1b" not in text


def test_no_server_is_said_and_is_no_success() -> None:
    status, text = printed(f"http://127.0.0.1:{free_port()}", "--once")
    assert status == 2 and "does not answer" in text and "Traceback" not in text


# ---------------------------------------------------------------- a terminal


@pytest.fixture
def terminal(server: Server) -> Iterator[Terminal]:
    """top.py, running in a terminal of 24 lines."""
    with in_terminal(*COMMAND, server.url) as running:
        yield running


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_shows_what_is_new_and_gives_the_terminal_back(
    server: Server, terminal: Terminal, number: int
) -> None:
    terminal.until(b"hit rate ")
    assert ALTERNATE_SCREEN in terminal.read
    session = f"live-{number}"
    asked(server, session)
    terminal.until(session.encode())
    assert terminal.end(number) == 0, bytes(terminal.read)
    assert terminal.read.rindex(MAIN_SCREEN) > terminal.read.rindex(b"hit rate ")
    assert SHOW_CURSOR in terminal.read
    assert b"Traceback" not in terminal.read
