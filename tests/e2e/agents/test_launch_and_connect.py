"""The six real agents work as `hearth launch` starts them, and as `hearth connect` says.

Each user has another server in the files, and the server here wants a key.
"""

import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from hearth.commands.agents.agent_setups import AGENTS as SETUPS
from tests.helpers.cases import DATA_DIR
from tests.helpers.clients.agent_projects import WORDS, installed, made_place
from tests.helpers.clients.npm_clients import node_bin, node_modules
from tests.helpers.clients.printed_setup import environment_in, put, texts_in
from tests.helpers.clients.run_clients import AGENTS, Agent, Place, Run, run_command
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.worker_processes.scripted_worker import MISSION

KEY = "sk-hearth-0123456789abcdef"
USERS: Final = yaml.safe_load((DATA_DIR / "clients/users.yaml").read_text())
TOLD = f"The words: {', '.join(WORDS)}."

Snapshot = dict[str, tuple[int, bytes]]
pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(PROXY_API_KEY=KEY) as running:
        yield running


@dataclass
class Desk:
    """One agent's user at work, as tests/data/clients/users.yaml has it."""

    name: str
    user: dict[str, Any]
    agent: Agent  # as the tests know it
    place: Place
    server: ScriptedServer

    def hearth(self, *arguments: str) -> Run:
        """Run a hearth command in the project."""
        command = [sys.executable, "-m", "hearth.commands.main", *arguments]
        ours = {**self.server.environment, **self.around}
        ours.pop("XDG_CONFIG_HOME", None)  # the user's files are below HOME
        return run_command(command, self.place.project, ours)

    @property
    def around(self) -> dict[str, str]:
        bins = [node_bin(), node_modules(self.agent.package) / ".bin"]
        return {
            "HOME": str(self.place.home),
            "PATH": ":".join(map(str, bins)) + ":/usr/local/bin:/usr/bin:/bin",
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            **self.user.get("environment", {}),
        }

    @property
    def asking(self) -> list[str]:
        """The words behind an agent's name that have it do its work once."""
        return [*self.user["command"], f"{MISSION}{self.place.project}/start.txt"]

    def snapshot(self) -> Snapshot:
        """Return what the user's own files are: all that were there before any start."""
        return {
            name: (stat.S_IMODE(file.stat().st_mode), file.read_bytes())
            for name in self.user["files"].keys() - self.user.get("own", ())
            if (file := self.place.home / name).exists()
        }


@pytest.fixture(params=SETUPS)
def desk(request: pytest.FixtureRequest, server: ScriptedServer, tmp_path: Path) -> Desk:
    user = USERS[request.param]
    agent = installed(AGENTS[user["agent"]])
    place = made_place(tmp_path, server.url, user["files"])
    return Desk(request.param, user, agent, place, server)


def files_with(text: str, home: Path) -> list[str]:
    """Return the files below `home` that hold `text`."""
    files = (path for path in home.rglob("*") if path.is_file() and not path.is_symlink())
    return [str(path.relative_to(home)) for path in files if text.encode() in path.read_bytes()]


def test_a_launched_agent_does_its_work_and_its_users_files_stay_as_they_are(desk: Desk) -> None:
    before = desk.snapshot()
    run = desk.hearth("launch", desk.name, "--", *desk.asking)
    assert run.code == 0, (run.out, run.err)
    assert desk.agent.said(run) == TOLD
    assert desk.snapshot() == before
    assert f"{desk.server.url} with 131,072 tokens" in run.err
    assert not files_with(KEY, desk.place.home)


def test_an_agent_that_is_set_up_as_connect_prints_asks_this_server(desk: Desk) -> None:
    before = desk.snapshot()
    connected = desk.hearth("connect", desk.name)
    assert connected.code == 0, (connected.out, connected.err)
    assert KEY not in connected.out + connected.err
    assert desk.snapshot() == before
    for path, text in texts_in(connected.out).items():
        put(path, text)
    environment = {**desk.around, **environment_in(connected.out, KEY)}  # it knows no server else
    run = run_command([desk.agent.program, *desk.asking], desk.place.project, environment)
    assert run.code == 0, (run.out, run.err)
    assert desk.agent.said(run) == TOLD
    assert not files_with(KEY, desk.place.home)
