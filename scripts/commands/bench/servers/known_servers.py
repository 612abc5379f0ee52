"""Says how each server that `hearth bench` knows is started, with its own defaults.

Hearth installs none of them: a user has one, or gets it by its `install`.
"""

import sys
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from hearth.commands.bench.results import HEARTH
from hearth.commands.bench.server import KEY, Memory, Server
from hearth.commands.bench.servers.server_environment import program_of
from hearth.shared.errors import StartError

# Rapid-MLX guides tool calls by a Metal kernel: without Metal each request with tools fails.
RAPID_WITHOUT_METAL: Final = () if sys.platform == "darwin" else ("--no-tool-call-parser",)
# Some listen on all of the machine's addresses unless told otherwise, and none asks for a key.
PLACE: Final = ("--port", "{port}", "--host", "127.0.0.1")
# llguidance masks the tokens that a schema forbids by a Metal kernel.
NO_SCHEMA: Final = "Without Metal it answers nothing that must obey a schema."
BY_URL: Final = ("It is not metered: its tokens read are what it says.",)

SERVERS: Final = {
    server.name: server
    for server in (
        Server(
            HEARTH,
            (sys.executable, "-m", "hearth.proxy.main"),
            {
                "MODEL_PATH": "{model}",
                "PROXY_HOST": "127.0.0.1",
                "PROXY_PORT": "{port}",
                # Without a key it tells no ids of prompts, from which the ideal is computed.
                "PROXY_API_KEY": KEY,
                "LOG_PROMPTS": "true",
                "RUN_DIR": "{dir}/run",
                "LOG_ROOT": "{dir}/logs",
                "KV_CACHE_DIR": "{dir}/kv",
            },
            memory_environment={
                # A live cache that rests beside what is kept is a session in memory too.
                Memory.ONE_SESSION: {"CACHE_RAM_BUDGET_MB": "{memory_mb}", "LIVE_SLOTS_MAX": "1"},
            },
            memory_extra={Memory.NONE: {"use_kv_cache": False}},
            packages=("hearth-llm", "mlx-lm", "mlx"),
            extra={},
        ),
        Server(
            "mlx_lm",
            ("mlx_lm.server", "--model", "{model}", *PLACE),
            memory_arguments={
                Memory.NONE: ("--prompt-cache-size", "0"),
                Memory.ONE_SESSION: ("--prompt-cache-bytes", "{memory_bytes}"),
            },
            install="uv tool install mlx-lm",
            packages=("mlx-lm", "mlx"),
            model="default_model",
            is_chat_only=True,
            notes=(
                "It keeps nothing on disk.",
                "It speaks chat completions alone: requests of Claude Code and Codex are sent to it"
                " as Hearth reads them, without the marks that change in each turn.",
            ),
        ),
        Server(
            "mlx_vlm",
            ("mlx_vlm.server", "--model", "{model}", *PLACE),
            {"APC_ENABLED": "1", "APC_DISK_PATH": "{dir}/apc"},
            memory_environment={
                Memory.NONE: {"APC_ENABLED": "0"},
                Memory.ONE_SESSION: {"APC_MEMORY_MAX_GB": "{memory_gb}"},
            },
            install="uv tool install mlx-vlm",
            packages=("mlx-vlm", "mlx-lm", "mlx"),
            notes=(
                "Its prefix cache is off by default; it is measured with it, disk too.",
                "It does not start on a qwen3_5 whose config has no text_config, as the text-only"
                " fixture; those that are published have one.",
                NO_SCHEMA,
            ),
        ),
        Server(
            "vllm-mlx",
            ("vllm-mlx", "serve", "{model}", *PLACE, "--continuous-batching"),
            memory_arguments={
                Memory.NONE: ("--disable-prefix-cache",),
                Memory.ONE_SESSION: ("--cache-memory-mb", "{memory_mb}"),
            },
            install="uv tool install vllm-mlx",
            packages=("vllm-mlx", "mlx-lm", "mlx-vlm", "mlx"),
            notes=(
                "Without --continuous-batching it has no prefix cache but of system prompts, and"
                " one cancelled request makes every later one fail.",
                "Its disk tier (--ssd-cache-dir), which its README advises for agents with long"
                " contexts, is off by default and stayed off: what it drops from memory is gone.",
                "From its second turn on a Codex session fails: a reasoning item whose content is"
                " null is a TypeError. The session was captured on another server, and Codex may"
                " send none such where vllm-mlx made the items.",
                NO_SCHEMA,
            ),
        ),
        Server(
            "rapid-mlx",
            ("rapid-mlx", "serve", "{model}", *PLACE, *RAPID_WITHOUT_METAL),
            memory_arguments={
                Memory.NONE: ("--disable-prefix-cache",),
                Memory.ONE_SESSION: ("--cache-memory-mb", "{memory_mb}"),
            },
            install="uv tool install rapid-mlx",
            packages=("rapid-mlx", "mlx-lm", "mlx-vlm", "mlx"),
            notes=(
                "Without Metal it runs with --no-tool-call-parser: its grammar of tool calls needs"
                " a Metal kernel.",
                NO_SCHEMA,
            ),
        ),
        # These are measured where they listen, if they are named.
        Server("ollama", url="http://127.0.0.1:11434", notes=BY_URL),
        Server("lm-studio", url="http://127.0.0.1:1234", notes=BY_URL),
        Server("llama-server", url="http://127.0.0.1:8080", notes=BY_URL),
    )
}


def chosen_servers(names: Sequence[str], urls: Sequence[str]) -> list[Server]:
    """Return the servers that are measured, Hearth first: the others are compared with it.

    Without names all that this user has. `urls` are `NAME=URL`.

    Raises:
        StartError: no server has one of the names, two have one name, or one is not there.
    """
    if odd := sorted(set(names) - set(SERVERS)):
        raise StartError(f"No server is called {', '.join(odd)}; there are {', '.join(SERVERS)}.")
    servers = [SERVERS[name] for name in dict.fromkeys(names)] or [
        each for each in SERVERS.values() if not each.url and program_of(each)
    ]
    for each in servers:
        if not each.url and program_of(each) is None:
            raise StartError(f"{each.name} is not on this machine. Get it by: {each.install}")
    servers += map(server_of_url, urls)
    every = [server.name for server in servers]
    if twice := sorted({name for name in every if every.count(name) > 1}):
        raise StartError(f"Two servers are called {', '.join(twice)}. Give one another name.")
    return sorted(servers, key=lambda server: server.name != HEARTH)


def server_of_url(text: str) -> Server:
    """Return the server that `NAME=URL` names; `NAME=URL#MODEL` where it serves several models.

    Raises:
        StartError: it is not of that form.
    """
    name, _, url = text.partition("=")
    url, _, model = url.partition("#")
    parts = urlsplit(url)
    if not (name and parts.scheme in ("http", "https") and parts.netloc):
        raise StartError(f"--server: {text} is not NAME=URL, as mine=http://127.0.0.1:8000")
    if "@" in parts.netloc:
        raise StartError(f"--server: the URL of {name} has a name or a key in it, which is refused")
    return Server(name, url=url.rstrip("/").removesuffix("/v1"), model=model, notes=BY_URL)
