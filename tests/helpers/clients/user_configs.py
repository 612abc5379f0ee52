"""Holds what users of the agents have in their configuration files: other servers, and wishes.

Each asks a server that does not exist, so that an agent which works does not go by it; and each
lets its agent read files without asking, so that one which works does go by the rest.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hearth.commands.agents.agent_setups import AGENTS as SETUPS
from tests.helpers.clients.run_clients import AGENTS, Agent, Run

NOWHERE: Final = "http://127.0.0.1:9"


@dataclass(frozen=True)
class User:
    """A user of one agent: what is in the files, and how the agent is called for one answer."""

    agent: Agent  # as the tests know it
    files: dict[str, str]  # below HOME
    arguments: tuple[str, ...]  # a prompt follows
    environment: dict[str, str]
    own: tuple[str, ...] = ()  # files in which the agent itself notes its starts

    def write_files(self, home: Path, project: Path) -> None:
        for name, text in self.files.items():
            file = home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("PROJECT", str(project)))

    def said(self, run: Run) -> str:
        return self.agent.said(run)


def _json(**values: object) -> str:
    return json.dumps(values, indent=4) + "\n"


CLAUDE: Final = _json(
    env={"ANTHROPIC_BASE_URL": NOWHERE, "ANTHROPIC_MODEL": "opus", "ANTHROPIC_API_KEY": "sk-user"},
    model="opus",
    permissions={"allow": ["Read(//PROJECT/**)"]},
)
CODEX: Final = f"""\
# what I like
model = "gpt-5"  # the best
model_provider = "other"
model_context_window = 1000
sandbox_mode = "danger-full-access"
approval_policy = "never"
check_for_update_on_startup = false

[model_providers.other]
name = "Other"
base_url = "{NOWHERE}/v1"
wire_api = "responses"

[analytics]
enabled = false

[feedback]
enabled = false

[features]
plugins = false
"""
OPENCODE: Final = f"""\
{{
  "$schema": "https://opencode.ai/config.json", // else it writes it there
  "model": "other/x",
  "enabled_providers": ["other"],
  "provider": {{
    "other": {{
      "npm": "@ai-sdk/openai-compatible",
      "options": {{"baseURL": "{NOWHERE}/v1"}},
      "models": {{"x": {{}}}},
    }},
  }},
  "permission": {{"*": "allow"}}, // all of it
  "autoupdate": false,
  "share": "disabled",
}}
"""
PI_MODELS: Final = f"""\
{{
  // mine
  "providers": {{
    "other": {{
      "baseUrl": "{NOWHERE}/v1", "api": "openai-completions", "apiKey": "k",
      "models": [{{"id": "x"}}]
    }}
  }}
}}
"""
QWEN: Final = _json(
    modelProviders={
        "openai": [{"id": "other", "baseUrl": f"{NOWHERE}/v1", "envKey": "OTHER_KEY"}],
    },
    security={"auth": {"selectedType": "openai"}},
    model={"name": "other"},
    tools={"approvalMode": "yolo"},
    memory={"enableManagedAutoMemory": False},
    privacy={"usageStatisticsEnabled": False},
    general={"enableAutoUpdate": False},
    **{"$version": 4},  # else it writes it there
)
OPENCLAW: Final = f"""\
{{ // mine
  agents: {{
    defaults: {{ model: 'other/x', skipBootstrap: true, workspace: 'PROJECT', }},
  }},
  models: {{
    providers: {{
      other: {{
        baseUrl: '{NOWHERE}/v1', apiKey: 'k', api: 'openai-completions',
        models: [{{ id: 'x', name: 'x', contextWindow: 65536, maxTokens: 8192 }}],
      }},
    }},
  }},
  update: {{ checkOnStart: false }},
}}
"""
OPENCODE_OFF: Final = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS", "SHARE")

USERS: Final = {
    "claude": User(
        AGENTS["Claude Code"],
        {
            ".claude/settings.json": CLAUDE,
            ".claude/CLAUDE.md": "Be brief.\n",
            ".claude.json": _json(mcpServers={}, hasCompletedOnboarding=True),
        },
        ("-p", "--output-format", "json"),
        {"IS_SANDBOX": "1", "DISABLE_AUTOUPDATER": "1"},
        own=(".claude.json",),
    ),
    "codex": User(
        AGENTS["Codex"],
        {".codex/config.toml": CODEX, ".codex/AGENTS.md": "Be brief.\n"},
        ("exec", "--json", "--skip-git-repo-check"),
        {},
    ),
    "opencode": User(
        AGENTS["opencode"],
        {".config/opencode/opencode.json": OPENCODE},
        ("run", "--format", "json"),
        {f"OPENCODE_DISABLE_{name}": "1" for name in OPENCODE_OFF},
    ),
    "pi": User(
        AGENTS["PI"],
        {
            ".pi/agent/models.json": PI_MODELS,
            ".pi/agent/settings.json": _json(defaultProvider="other", defaultModel="x"),
        },
        ("-p", "--mode", "json"),
        {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
    ),
    "qwen": User(
        AGENTS["Qwen Code"],
        {".qwen/settings.json": QWEN, ".qwen/QWEN.md": "Be brief.\n"},
        ("-o", "json"),
        # A shell may have these of another server.
        {"OPENAI_BASE_URL": f"{NOWHERE}/v1", "OPENAI_API_KEY": "sk-user"},
    ),
    "openclaw": User(
        AGENTS["OpenClaw"],
        {".openclaw/openclaw.json": OPENCLAW},
        (
            *("agent", "--local", "--json", "--agent", "main"),
            *("--session-id", "11111111-2222-4333-8444-555555555501", "-m"),
        ),
        {"OPENCLAW_DISABLE_BONJOUR": "1", "DO_NOT_TRACK": "1"},
    ),
}
assert USERS.keys() == SETUPS.keys()
