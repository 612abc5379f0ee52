"""The six real agents work as `hearth launch` starts them, and as `hearth connect` says.

Each user has another server in the files, and the server here wants a key.
"""

import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.clients.agent_projects import WORDS, installed
from tests.helpers.clients.npm_clients import node_bin, node_modules
from tests.helpers.clients.printed_setup import environment_in, put, texts_in
from tests.helpers.clients.run_clients import Run, run_command
from tests.helpers.clients.user_configs import USERS, User
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.worker_processes.scripted_worker import FILES, MISSION

KEY = "sk-hearth-0123456789abcdef"
TOLD = f"The words: {', '.join(WORDS)}."

Snapshot = dict[str, tuple[int, bytes]]
pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(PROXY_API_KEY=KEY) as running:
        yield running


@dataclass
class Desk:
    """One agent's user at work: a home, a project, and the server's settings in the environment."""

    name: str
    user: User
    home: Path
    project: Path
    server: ScriptedServer

    def hearth(self, *arguments: str) -> Run:
        """Run a hearth command in the project."""
        command = [sys.executable, "-m", "hearth.commands.main", *arguments]
        ours = {**self.server.environment, **self.around}
        ours.pop("XDG_CONFIG_HOME", None)  # the user's files are below HOME
        return run_command(command, self.project, ours)

    def agent(self, environment: dict[str, str], *arguments: str) -> Run:
        """Run the agent itself, which knows of no server but by its files and `environment`."""
        agent = self.user.agent
        binary = node_modules(agent.package) / ".bin" / agent.binary
        return run_command([str(binary), *arguments], self.project, {**self.around, **environment})

    @property
    def around(self) -> dict[str, str]:
        bins = [node_bin(), node_modules(self.user.agent.package) / ".bin"]
        return {
            "HOME": str(self.home),
            "PATH": ":".join(map(str, bins)) + ":/usr/local/bin:/usr/bin:/bin",
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            **self.user.environment,
        }

    @property
    def mission(self) -> str:
        return f"{MISSION}{self.project}/start.txt"

    def snapshot(self) -> Snapshot:
        """Return what the user's own files are: all that were there before any start."""
        return {
            name: (stat.S_IMODE(file.stat().st_mode), file.read_bytes())
            for name in self.user.files
            if name not in self.user.own and (file := self.home / name).exists()
        }


@pytest.fixture(params=USERS)
def desk(request: pytest.FixtureRequest, server: ScriptedServer, tmp_path: Path) -> Desk:
    user = USERS[request.param]
    installed(user.agent)
    made = Desk(request.param, user, tmp_path / "home", tmp_path / "project", server)
    made.home.mkdir()
    made.project.mkdir()
    user.write_files(made.home, made.project)
    for (name, text), word in zip(FILES.items(), WORDS, strict=True):
        (made.project / name).write_text(text.format(word) + "\n")
    return made


def files_with(text: str, home: Path) -> list[str]:
    """Return the files below `home` that hold `text`."""
    files = (path for path in home.rglob("*") if path.is_file() and not path.is_symlink())
    return [str(path.relative_to(home)) for path in files if text.encode() in path.read_bytes()]


def test_a_launched_agent_does_its_work_and_its_users_files_stay_as_they_are(desk: Desk) -> None:
    before = desk.snapshot()
    run = desk.hearth("launch", desk.name, "--", *desk.user.arguments, desk.mission)
    assert run.code == 0, (run.out, run.err)
    assert desk.user.said(run) == TOLD
    assert desk.snapshot() == before
    assert f"{desk.server.url} with 131,072 tokens" in run.err
    assert not files_with(KEY, desk.home)


def test_an_agent_that_is_set_up_as_connect_prints_asks_this_server(desk: Desk) -> None:
    before = desk.snapshot()
    connected = desk.hearth("connect", desk.name)
    assert connected.code == 0, (connected.out, connected.err)
    assert KEY not in connected.out + connected.err
    assert desk.snapshot() == before
    for path, text in texts_in(connected.out).items():
        put(path, text)
    run = desk.agent(environment_in(connected.out, KEY), *desk.user.arguments, desk.mission)
    assert run.code == 0, (run.out, run.err)
    assert desk.user.said(run) == TOLD
    assert not files_with(KEY, desk.home)
