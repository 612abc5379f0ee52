"""Sets up the agents that Hearth knows: each one's variables, files and options, as values."""

import json
from itertools import chain
from pathlib import Path
from typing import Any, Final

from hearth.commands.agents.agent_setup import (
    KEY_VARIABLE,
    OURS,
    Agent,
    ConfigText,
    Endpoint,
    Launch,
    Surroundings,
    json_of,
)
from hearth.commands.agents.user_config import Values, json_in
from hearth.shared.errors import StartError

TITLE: Final = "Hearth"


def _told(**values: Any) -> Values:
    """Return `values` without those that are not known."""
    return {name: value for name, value in values.items() if value is not None}


# ---------------------------------------------------------------- Claude Code

CLAUDE_KEY: Final = "ANTHROPIC_AUTH_TOKEN"
# Any of these, set, has it ask another provider.
CLAUDE_PROVIDERS: Final = (
    "BEDROCK",
    "VERTEX",
    "FOUNDRY",
    "MANTLE",
    "GATEWAY",
    "ANTHROPIC_AWS",
    "ANTHROPIC_GOOGLE_CLOUD",
)


def _claude_environment(endpoint: Endpoint) -> dict[str, str]:
    """Return its variables. Not ANTHROPIC_DEFAULT_OPUS_MODEL: it then rewrites its user's settings.

    The names that it uses for small tasks are served by CATCH_ALL_MODELS.
    """
    context = endpoint.context_tokens
    return {
        "ANTHROPIC_BASE_URL": endpoint.base_url,
        "ANTHROPIC_MODEL": endpoint.model,
        **({"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context)} if context else {}),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _launch_claude(endpoint: Endpoint, surroundings: Surroundings) -> Launch:
    environment = _claude_environment(endpoint) | {CLAUDE_KEY: endpoint.sent_key}
    others = tuple(f"CLAUDE_CODE_USE_{name}" for name in CLAUDE_PROVIDERS)
    removed = ("ANTHROPIC_API_KEY", *others)
    # The user's own settings.json may set the same variables, and comes before the environment.
    settings = {"env": environment | dict.fromkeys(removed, "")}
    file = surroundings.directory / "settings.json"
    return Launch(
        ("--settings", str(file)), environment, removed, files={file.name: json_of(settings)}
    )


def _claude_texts(endpoint: Endpoint, surroundings: Surroundings) -> list[ConfigText]:
    environment = _claude_environment(endpoint)
    if not endpoint.key:
        environment[CLAUDE_KEY] = endpoint.sent_key
    path = surroundings.folder("CLAUDE_CONFIG_DIR", ".claude") / "settings.json"
    return [ConfigText(path, json_of({"env": environment}))]


# ---------------------------------------------------------------- Codex


def _codex_lines(endpoint: Endpoint, key_variable: str | None) -> list[str]:
    """Return its settings as lines of TOML, each with the whole path of its key."""
    provider = _told(name=TITLE, base_url=endpoint.v1, wire_api="responses", env_key=key_variable)
    settings = _told(
        model=endpoint.model, model_provider=OURS, model_context_window=endpoint.context_tokens
    ) | {f"model_providers.{OURS}.{name}": value for name, value in provider.items()}
    return [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()]


def _launch_codex(endpoint: Endpoint, surroundings: Surroundings) -> Launch:
    options = (("-c", line) for line in _codex_lines(endpoint, KEY_VARIABLE))
    return Launch(tuple(chain(*options)), {KEY_VARIABLE: endpoint.sent_key})


def _codex_texts(endpoint: Endpoint, surroundings: Surroundings) -> list[ConfigText]:
    lines = _codex_lines(endpoint, KEY_VARIABLE if endpoint.key else None)
    path = surroundings.folder("CODEX_HOME", ".codex") / "config.toml"
    remark = "These lines stand at the top of the file, above its first [table]."
    return [ConfigText(path, "\n".join(lines) + "\n", remark)]


# ---------------------------------------------------------------- opencode


def _opencode_settings(endpoint: Endpoint, key: str) -> Values:
    limit = {"context": endpoint.context_tokens, "output": endpoint.answer_tokens}
    model: Values = {"name": endpoint.model, "reasoning": True, "tool_call": True}
    if endpoint.context_tokens:
        model["limit"] = limit
    if endpoint.takes_images:
        model |= {"attachment": True, "modalities": {"input": endpoint.inputs, "output": ["text"]}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": TITLE,
        "options": {"baseURL": endpoint.v1, "apiKey": key},
        "models": {endpoint.model: model},
    }
    return {"model": f"{OURS}/{endpoint.model}", "provider": {OURS: provider}}


def _launch_opencode(endpoint: Endpoint, surroundings: Surroundings) -> Launch:
    settings = _opencode_settings(endpoint, f"{{env:{KEY_VARIABLE}}}")
    settings |= {"small_model": settings["model"], "enabled_providers": [OURS]}
    variable = "OPENCODE_CONFIG_CONTENT"  # comes before all its files
    own = json_in(surroundings.environ.get(variable, ""), f"${variable}")
    content = json.dumps(_merged(own, settings))
    return Launch(environment={variable: content, KEY_VARIABLE: endpoint.sent_key})


def _opencode_texts(endpoint: Endpoint, surroundings: Surroundings) -> list[ConfigText]:
    settings = _opencode_settings(endpoint, endpoint.key_or(f"{{env:{KEY_VARIABLE}}}"))
    folder = surroundings.folder("XDG_CONFIG_HOME", ".config") / "opencode"
    path = folder / "opencode.jsonc"  # comes before opencode.json
    if not path.exists():
        path = folder / "opencode.json"
    remark = f'Where it has "enabled_providers", "{OURS}" is to be one of them.'
    return [ConfigText(path, json_of(settings), remark)]


# ---------------------------------------------------------------- PI


def _pi_provider(endpoint: Endpoint, key: str) -> Values:
    model = _told(
        id=endpoint.model,
        name=endpoint.model,
        reasoning=True,
        input=endpoint.inputs,
        contextWindow=endpoint.context_tokens,
        maxTokens=endpoint.answer_tokens,
        cost=dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
    )
    return {
        "baseUrl": endpoint.v1,
        "api": "openai-completions",
        "apiKey": key,
        "models": [model],
    }


def _launch_pi(endpoint: Endpoint, surroundings: Surroundings) -> Launch:
    """A provider comes by an extension: its files stay as they are, and all of them apply."""
    provider = json_of({"name": TITLE} | _pi_provider(endpoint, f"${KEY_VARIABLE}"))
    extension = f'export default (pi) => pi.registerProvider("{OURS}", {provider});\n'
    file = surroundings.directory / "hearth.js"
    return Launch(
        ("--extension", str(file), "--provider", OURS, "--model", endpoint.model),
        {KEY_VARIABLE: endpoint.sent_key},
        files={file.name: extension},
    )


def _pi_texts(endpoint: Endpoint, surroundings: Surroundings) -> list[ConfigText]:
    folder = surroundings.folder("PI_CODING_AGENT_DIR", ".pi/agent")
    provider = _pi_provider(endpoint, endpoint.key_or(f"${KEY_VARIABLE}"))
    default = {"defaultProvider": OURS, "defaultModel": endpoint.model}
    return [
        ConfigText(folder / "models.json", json_of({"providers": {OURS: provider}})),
        ConfigText(folder / "settings.json", json_of(default)),
    ]


# ---------------------------------------------------------------- Qwen Code

QWEN_SYSTEM: Final = "QWEN_CODE_SYSTEM_SETTINGS_PATH"
QWEN_DEFAULTS: Final = "QWEN_CODE_SYSTEM_DEFAULTS_PATH"
QWEN_SYSTEM_PATHS: Final = (
    "/etc/qwen-code/settings.json",
    "/Library/Application Support/QwenCode/settings.json",
)


def _qwen_settings(endpoint: Endpoint) -> Values:
    model: Values = {
        "id": endpoint.model,
        "name": f"{TITLE}: {endpoint.model}",
        "baseUrl": endpoint.v1,
        "envKey": KEY_VARIABLE,
    }
    if endpoint.context_tokens:
        model["generationConfig"] = {"contextWindowSize": endpoint.context_tokens}
    return {
        "modelProviders": {"openai": [model]},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": endpoint.model},
    }


def _launch_qwen(endpoint: Endpoint, surroundings: Surroundings) -> Launch:
    """Settings of the system come before a user's, so ours are among them for this start."""
    paths = [Path(path) for path in QWEN_SYSTEM_PATHS]
    if named := surroundings.environ.get(QWEN_SYSTEM):
        paths = [Path(named)]
    system = next((path for path in paths if path.is_file()), paths[0])
    try:
        settings = json_in(system.read_text() if system.exists() else "", str(system))
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{system} cannot be read: {error}") from None
    file = surroundings.directory / "settings.json"
    defaults = surroundings.environ.get(QWEN_DEFAULTS) or str(
        system.parent / "system-defaults.json"
    )
    return Launch(
        environment={
            QWEN_SYSTEM: str(file),
            QWEN_DEFAULTS: defaults,
            KEY_VARIABLE: endpoint.sent_key,
        },
        files={file.name: json_of(_merged(settings, _qwen_settings(endpoint)))},
    )


def _qwen_texts(endpoint: Endpoint, surroundings: Surroundings) -> list[ConfigText]:
    settings = _qwen_settings(endpoint)
    if not endpoint.key:
        settings["env"] = {KEY_VARIABLE: endpoint.sent_key}
    path = surroundings.folder("QWEN_HOME", ".qwen") / "settings.json"
    return [ConfigText(path, json_of(settings))]


def _merged(values: Values, over: Values) -> Values:
    made = dict(values)
    for name, value in over.items():
        there = made.get(name)
        if isinstance(value, dict) and isinstance(there, dict):
            value = _merged(there, value)
        made[name] = value
    return made


# ---------------------------------------------------------------- OpenClaw


def _openclaw_settings(endpoint: Endpoint, key: str) -> Values:
    model = _told(
        id=endpoint.model,
        name=endpoint.model,
        reasoning=True,
        input=endpoint.inputs,
        contextWindow=endpoint.context_tokens,
        maxTokens=endpoint.answer_tokens,
    )
    provider = {
        "baseUrl": endpoint.v1,
        "apiKey": key,
        "api": "openai-completions",
        "models": [model],
    }
    name = f"{OURS}/{endpoint.model}"
    return {
        "agents": {"defaults": {"model": {"primary": name}}},
        "models": {"providers": {OURS: provider}},
    }


def _openclaw_path(surroundings: Surroundings) -> Path:
    if named := surroundings.environ.get("OPENCLAW_CONFIG_PATH"):
        return Path(named).expanduser()
    return surroundings.folder("OPENCLAW_STATE_DIR", ".openclaw") / "openclaw.json"


def _launch_openclaw(endpoint: Endpoint, surroundings: Surroundings) -> Launch:
    """Its configuration is one of ours that includes the user's."""
    own = _openclaw_path(surroundings)
    settings = _openclaw_settings(endpoint, f"${{{KEY_VARIABLE}}}")
    roots = surroundings.environ.get("OPENCLAW_INCLUDE_ROOTS")
    if own.is_file():
        settings = {"$include": str(own.absolute())} | settings
    folders = [str(own.absolute().parent), str(own.resolve().parent), *([roots] if roots else [])]
    file = surroundings.directory / "openclaw.json"
    return Launch(
        environment={
            "OPENCLAW_CONFIG_PATH": str(file),
            "OPENCLAW_INCLUDE_ROOTS": ":".join(dict.fromkeys(folders)),
            KEY_VARIABLE: endpoint.sent_key,
        },
        files={file.name: json_of(settings)},
        default_arguments=("chat",),
    )


def _openclaw_texts(endpoint: Endpoint, surroundings: Surroundings) -> list[ConfigText]:
    settings = _openclaw_settings(endpoint, endpoint.key_or(f"${{{KEY_VARIABLE}}}"))
    return [ConfigText(_openclaw_path(surroundings), json_of(settings))]


# ---------------------------------------------------------------- all

AGENTS: Final = {
    "claude": Agent(
        "Claude Code",
        "claude",
        "@anthropic-ai/claude-code",
        11_400,
        _launch_claude,
        _claude_texts,
        "a managed settings file comes before these, and a --settings of yours instead of them",
        key_variable=CLAUDE_KEY,
    ),
    "codex": Agent("Codex", "codex", "@openai/codex", 8_200, _launch_codex, _codex_texts),
    "opencode": Agent(
        "opencode",
        "opencode",
        "opencode-ai",
        7_000,
        _launch_opencode,
        _opencode_texts,
        "only Hearth's provider is on, so an agent of yours with another model finds none",
    ),
    "pi": Agent("PI", "pi", "@earendil-works/pi-coding-agent", 1_200, _launch_pi, _pi_texts),
    "qwen": Agent(
        "Qwen Code",
        "qwen",
        "@qwen-code/qwen-code",
        15_600,
        _launch_qwen,
        _qwen_texts,
        "models of your own modelProviders.openai are not listed",
    ),
    "openclaw": Agent(
        "OpenClaw",
        "openclaw",
        "openclaw",
        7_400,
        _launch_openclaw,
        _openclaw_texts,
        "a gateway that runs keeps its own configuration, and changes that OpenClaw makes to its "
        "configuration meanwhile are not kept",
    ),
}
