"""Configures the real agent clients and runs them headless, as a user would.

Each run has a HOME of its own, nothing of the environment around it, and all that calls home off.
"""

import functools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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

    def write(self, path: str, text: str) -> None:
        """Write a configuration file below HOME."""
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


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


@dataclass(frozen=True)
class Agent:
    """One client. `said` reads its final words from what it printed."""

    name: str
    package: str  # name@version
    binary: str
    configure: Callable[[Place], None]
    environment: Callable[[Place], dict[str, str]]
    command: Callable[[str, Run | None], list[str]]  # (prompt, the run that it continues)
    said: Callable[[Run], str]
    logs: tuple[str, ...] = ()  # patterns below HOME
    trouble: str = r"(?i)warn|error|fail|retry|unexpected|invalid"  # how a log tells of it
    harmless: str = r"$^"  # lines of that kind that the server has no part in

    def run(self, place: Place, prompt: str, before: Run | None = None) -> Run:
        """Have the client work on `prompt`, in the session of the run `before` if one is given."""
        binary = node_modules(self.package) / ".bin" / self.binary
        environment = {
            "PATH": f"{node_bin()}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(place.home),
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            **self.environment(place),
        }
        return run_command([str(binary), *self.command(prompt, before)], place.project, environment)

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


def _nothing(place: Place) -> None:
    """Some are set up by their environment alone."""


def _claude_environment(place: Place) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_AUTH_TOKEN": "local",
        "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT_TOKENS),
        "IS_SANDBOX": "1",  # root may skip the permissions
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _claude_command(prompt: str, before: Run | None) -> list[str]:
    options = ["--output-format", "json", "--dangerously-skip-permissions", "--debug"]
    return ["-p", prompt, *options, *(["--continue"] if before else [])]


def _claude_said(run: Run) -> str:
    (row,) = run.events
    said: str = row["result"]
    return said


CODEX_CONFIG: Final = """
model = "{model}"
model_provider = "hearth"
model_context_window = {context}
check_for_update_on_startup = false

[model_providers.hearth]
name = "Hearth"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "HEARTH_KEY"

[analytics]
enabled = false

[feedback]
enabled = false

[features]
plugins = false  # else it fetches a list of them from GitHub
"""


def _codex_configure(place: Place) -> None:
    text = CODEX_CONFIG.format(model=MODEL, context=CONTEXT_TOKENS, url=place.url)
    place.write(".codex/config.toml", text)


def _codex_command(prompt: str, before: Run | None) -> list[str]:
    options = ["--json", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"]
    if before is None:
        return ["exec", *options, prompt]
    return ["exec", "resume", before.events[0]["thread_id"], *options, prompt]


def _codex_said(run: Run) -> str:
    items = [event["item"] for event in run.events if event["type"] == "item.completed"]
    return [str(item["text"]) for item in items if item["type"] == "agent_message"][-1]


def _opencode_configure(place: Place) -> None:
    limit = {"context": CONTEXT_TOKENS, "output": 16_384}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Hearth",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "local"},
        "models": {MODEL: {"name": MODEL, "reasoning": True, "tool_call": True, "limit": limit}},
    }
    config = {
        "provider": {"hearth": provider},
        "permission": {"*": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    place.write(".config/opencode/opencode.json", json.dumps(config))


def _opencode_environment(place: Place) -> dict[str, str]:
    names = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS", "SHARE")
    return {f"OPENCODE_DISABLE_{name}": "1" for name in names} | {"DO_NOT_TRACK": "1"}


def _opencode_command(prompt: str, before: Run | None) -> list[str]:
    options = ["--format", "json", "-m", f"hearth/{MODEL}", *(["--continue"] if before else [])]
    return ["run", *options, prompt]


def _opencode_said(run: Run) -> str:
    parts = [event["part"] for event in run.events if event["type"] == "text"]
    return str(parts[-1]["text"])


def _pi_configure(api: str, place: Place) -> None:
    model = {
        "id": MODEL,
        "reasoning": True,
        "contextWindow": CONTEXT_TOKENS,
        "maxTokens": 16_384,
    }
    provider = {
        "baseUrl": place.url if api == "anthropic-messages" else f"{place.url}/v1",
        "api": api,
        "apiKey": "local",
        "models": [model],
    }
    place.write(".pi/agent/models.json", json.dumps({"providers": {"hearth": provider}}))


def _pi_environment(place: Place) -> dict[str, str]:
    return {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"}


def _pi_command(prompt: str, before: Run | None) -> list[str]:
    options = ["--mode", "json", "--provider", "hearth", "--model", MODEL]
    return ["-p", *options, *(["--continue"] if before else []), prompt]


def _pi_said(run: Run) -> str:
    end = [event for event in run.events if event["type"] == "agent_end"][-1]
    content = end["messages"][-1]["content"]
    return "".join(block["text"] for block in content if block["type"] == "text")


def _openclaw_configure(place: Place) -> None:
    model = {
        "id": MODEL,
        "name": MODEL,
        "reasoning": True,
        "input": ["text"],
        "contextWindow": CONTEXT_TOKENS,
        "maxTokens": 16_384,
    }
    provider = {
        "baseUrl": f"{place.url}/v1",
        "apiKey": "local",
        "api": "openai-completions",
        "models": [model],
    }
    workspace = {"workspace": str(place.project), "skipBootstrap": True}
    config = {
        "agents": {"defaults": {"model": {"primary": f"hearth/{MODEL}"}, **workspace}},
        "models": {"providers": {"hearth": provider}},
        "update": {"checkOnStart": False},
    }
    place.write(".openclaw/openclaw.json", json.dumps(config))


def _openclaw_environment(place: Place) -> dict[str, str]:
    return {"OPENCLAW_DISABLE_BONJOUR": "1", "DO_NOT_TRACK": "1"}


def _openclaw_command(prompt: str, before: Run | None) -> list[str]:
    session = ["--session-id", "11111111-2222-4333-8444-555555555501"]
    return ["agent", "--local", "--json", "--agent", "main", *session, "-m", prompt]


def _openclaw_said(run: Run) -> str:
    row = json.loads(run.out[run.out.index("{") :])
    return str(row["payloads"][-1]["text"])


def _qwen_configure(place: Place) -> None:
    model = {
        "id": MODEL,
        "baseUrl": f"{place.url}/v1",
        "envKey": "HEARTH_KEY",
        "generationConfig": {"contextWindowSize": CONTEXT_TOKENS},
    }
    settings = {
        "$version": 4,  # else it writes it there
        "modelProviders": {"openai": [model]},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": MODEL},
        "memory": {"enableManagedAutoMemory": False},  # a request of its own after each turn
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
    }
    place.write(".qwen/settings.json", json.dumps(settings))


def _qwen_environment(place: Place) -> dict[str, str]:
    return {"HEARTH_KEY": "local", "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"}


def _qwen_command(prompt: str, before: Run | None) -> list[str]:
    return ["--yolo", "-o", "json", *(["--continue"] if before else []), prompt]


def _qwen_said(run: Run) -> str:
    return str(json.loads(run.out)[-1]["result"])


AGENTS: Final = {
    agent.name: agent
    for agent in (
        Agent(
            "Claude Code",
            npm_clients.CLAUDE_CODE,
            "claude",
            _nothing,
            _claude_environment,
            _claude_command,
            _claude_said,
            logs=(".claude/debug/*.txt",),
            trouble=r"\[(WARN|ERROR)\]|parse",
            # It tells of a stall where a loaded machine prefills its long prompt for half a minute.
            harmless=r"isn't described|Skill listing over budget|Failed to save config with lock"
            r"|[Ss]tall",
        ),
        Agent(
            "Codex",
            npm_clients.CODEX,
            "codex",
            _codex_configure,
            lambda place: {"HEARTH_KEY": "local", "RUST_LOG": "warn"},
            _codex_command,
            _codex_said,
            trouble=r" (WARN|ERROR) ",
            # Its flush of its own session file races with the end of `exec` (openai/codex #30144).
            # The answer has come whole, and each append has waited for its write before.
            harmless=r"Unknown model|fallback model metadata|helper binaries under temporary"
            r"|failed to flush rollout after emitting terminal turn event: thread \S+ not found",
        ),
        Agent(
            "opencode",
            npm_clients.OPENCODE,
            "opencode",
            _opencode_configure,
            _opencode_environment,
            _opencode_command,
            _opencode_said,
            logs=(".local/share/opencode/log/*",),
            trouble=r"level=(WARN|ERROR)",
        ),
        *(
            Agent(
                name,
                npm_clients.PI,
                "pi",
                functools.partial(_pi_configure, api),
                _pi_environment,
                _pi_command,
                _pi_said,
            )
            for name, api in (
                ("PI", "openai-completions"),
                ("PI over Responses", "openai-responses"),
                ("PI over Messages", "anthropic-messages"),
            )
        ),
        Agent(
            "OpenClaw",
            npm_clients.OPENCLAW,
            "openclaw",
            _openclaw_configure,
            _openclaw_environment,
            _openclaw_command,
            _openclaw_said,
            harmless=r"SQLite",  # its own store, which it tidies on a thread that may come too late
        ),
        Agent(
            "Qwen Code",
            npm_clients.QWEN_CODE,
            "qwen",
            _qwen_configure,
            _qwen_environment,
            _qwen_command,
            _qwen_said,
            harmless=r"Ripgrep not available",
        ),
    )
}
