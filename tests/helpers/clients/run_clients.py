"""Configures the real agent clients and runs them headless, as a user would.

Each run has a HOME of its own, nothing of the environment around it, and all that calls home off.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.helpers.cases import DATA_DIR
from tests.helpers.clients import npm_clients
from tests.helpers.clients.npm_clients import node_bin, node_modules

RUN_WAIT_S_MAX: Final = 240
MODEL: Final = "local-model"
CONTEXT_TOKENS: Final = 131_072


# ---------------------------------------------------------------- running


@dataclass(frozen=True)
class Place:
    """Where a client runs: its HOME, the project it works in, and the server it asks."""

    home: Path
    project: Path
    url: str  # http://127.0.0.1:port

    def write(self, files: Mapping[str, Any]) -> None:
        """Write configuration files below HOME; one that is no text is JSON."""
        for name, told in files.items():
            file = self.home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            text = told if isinstance(told, str) else json.dumps(told, indent=4) + "\n"
            file.write_text(self.filled(text))

    def filled(self, text: str) -> str:
        """Return `text` with this place's words in it, as tests/data/clients/agents.yaml tells."""
        words = {"url": self.url, "model": MODEL, "context": CONTEXT_TOKENS}
        for name, word in {**words, "project": self.project}.items():
            text = text.replace(f"{{{name}}}", str(word))
        return text


@dataclass(frozen=True)
class Run:
    """What came of one headless run."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON lines of the output."""
        lines = (line for line in self.out.splitlines() if line.startswith("{"))
        return [json.loads(line) for line in lines]

    def printed(self, begin: str) -> Any:
        """Return the JSON that the output ends with, from the first `begin` on."""
        return json.loads(self.out[self.out.index(begin) :])


@dataclass(frozen=True)
class Agent:
    """One client, as tests/data/clients/agents.yaml has it."""

    package: str  # name@version
    said: Callable[[Run], str]  # reads the final words from what was printed
    binary: str
    files: dict[str, Any]
    environment: dict[str, str]
    command: list[str]
    again: Sequence[str] = ("--continue",)
    logs: Sequence[str] = ()
    trouble: str = r"(?i)warn|error|fail|retry|unexpected|invalid"
    harmless: str = r"$^"

    @property
    def program(self) -> str:
        return str(node_modules(self.package) / ".bin" / self.binary)

    def run(self, place: Place, prompt: str, before: Run | None = None) -> Run:
        """Have the client work on `prompt`, in the session of the run `before` if one is given."""
        environment = {
            "PATH": f"{node_bin()}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(place.home),
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            **{name: place.filled(text) for name, text in self.environment.items()},
        }
        command = [self.program, *map(place.filled, self.words(before))]
        command[command.index("PROMPT")] = prompt
        return run_command(command, place.project, environment)

    def words(self, before: Run | None) -> list[str]:
        """Return the words of the command that starts a session, or goes on with that of a run."""
        at = self.command.index("AGAIN")
        again = [*self.again] if before else []
        if before and "THREAD" in again:
            again[again.index("THREAD")] = before.events[0]["thread_id"]
        return [*self.command[:at], *again, *self.command[at + 1 :]]

    def warnings(self, place: Place, *runs: Run) -> list[str]:
        """Return the lines of the logs that tell of a server that was not understood."""
        texts = [run.err for run in runs]
        for pattern in self.logs:
            texts += [path.read_text(errors="replace") for path in place.home.glob(pattern)]
        return [
            line
            for line in "\n".join(texts).splitlines()
            if re.search(self.trouble, line) and not re.search(self.harmless, line)
        ]


def run_command(command: list[str], cwd: Path, environment: Mapping[str, str]) -> Run:
    """Run `command` to its end, with nothing to read."""
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=RUN_WAIT_S_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it started itself
        out, err = process.communicate()
        raise AssertionError(f"{command[0]} did not end:\n{out[-3000:]}\n{err[-3000:]}") from None
    return Run(process.returncode, out, err, time.monotonic() - began)


# ---------------------------------------------------------------- the clients


def _last(rows: Iterable[dict[str, Any]], kind: str) -> Any:
    """Return the last of the rows of that type."""
    return [row for row in rows if row["type"] == kind][-1]


def _pi_said(run: Run) -> str:
    content = _last(run.events, "agent_end")["messages"][-1]["content"]
    return "".join(block["text"] for block in content if block["type"] == "text")


def _codex_said(run: Run) -> str:
    items = [event["item"] for event in run.events if event["type"] == "item.completed"]
    return str(_last(items, "agent_message")["text"])


PACKAGES: Final[dict[str, tuple[str, Callable[[Run], str]]]] = {
    "Claude Code": (npm_clients.CLAUDE_CODE, lambda run: run.printed("{")["result"]),
    "Codex": (npm_clients.CODEX, _codex_said),
    "opencode": (npm_clients.OPENCODE, lambda run: _last(run.events, "text")["part"]["text"]),
    **dict.fromkeys(("PI", "PI over Responses", "PI over Messages"), (npm_clients.PI, _pi_said)),
    "OpenClaw": (npm_clients.OPENCLAW, lambda run: run.printed("{")["payloads"][-1]["text"]),
    "Qwen Code": (npm_clients.QWEN_CODE, lambda run: run.printed("[")[-1]["result"]),
}
_TOLD: Final = yaml.safe_load((DATA_DIR / "clients/agents.yaml").read_text())
AGENTS: Final = {name: Agent(*PACKAGES[name], **row) for name, row in _TOLD.items()}
