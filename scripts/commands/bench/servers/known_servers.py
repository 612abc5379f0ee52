"""Says how each server that `hearth bench` knows is started, with its own defaults."""

import sys
from typing import Final

from hearth.commands.bench.results import HEARTH
from hearth.commands.bench.server import KEY, Memory, Server

# Rapid-MLX guides tool calls by a Metal kernel: without Metal each request with tools fails.
RAPID_WITHOUT_METAL: Final = () if sys.platform == "darwin" else ("--no-tool-call-parser",)
# Some listen on all of the machine's addresses unless told otherwise, and none asks for a key.
LOOPBACK: Final = ("--host", "127.0.0.1")
# llguidance masks the tokens that a schema forbids by a Metal kernel.
NO_SCHEMA: Final = "Without Metal it answers nothing that must obey a schema."

SERVERS: Final = {
    server.name: server
    for server in (
        Server(
            HEARTH,
            ("-m", "hearth.proxy.main"),
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
            extra={},
        ),
        Server(
            "mlx_lm",
            ("-m", "mlx_lm", "server", "--model", "{model}", "--port", "{port}", *LOOPBACK),
            memory_arguments={
                Memory.NONE: ("--prompt-cache-size", "0"),
                Memory.ONE_SESSION: ("--prompt-cache-bytes", "{memory_bytes}"),
            },
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
            ("-m", "mlx_vlm.server", "--model", "{model}", "--port", "{port}", *LOOPBACK),
            {"APC_ENABLED": "1", "APC_DISK_PATH": "{dir}/apc"},
            memory_environment={
                Memory.NONE: {"APC_ENABLED": "0"},
                Memory.ONE_SESSION: {"APC_MEMORY_MAX_GB": "{memory_gb}"},
            },
            notes=(
                "Its prefix cache is off by default; it is measured with it, disk too.",
                "It does not start on a qwen3_5 whose config has no text_config, as the text-only"
                " fixture; those that are published have one.",
                NO_SCHEMA,
            ),
        ),
        Server(
            "vllm-mlx",
            (
                *("-m", "vllm_mlx.cli", "serve", "{model}", "--port", "{port}", *LOOPBACK),
                "--continuous-batching",
            ),
            memory_arguments={
                Memory.NONE: ("--disable-prefix-cache",),
                Memory.ONE_SESSION: ("--cache-memory-mb", "{memory_mb}"),
            },
            package="vllm-mlx==0.6.0",
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
            (
                *("-m", "rapid_mlx.cli", "serve", "{model}", "--port", "{port}", *LOOPBACK),
                *RAPID_WITHOUT_METAL,
            ),
            memory_arguments={
                Memory.NONE: ("--disable-prefix-cache",),
                Memory.ONE_SESSION: ("--cache-memory-mb", "{memory_mb}"),
            },
            package="rapid-mlx==0.16.10",
            notes=(
                "Without Metal it runs with --no-tool-call-parser: its grammar of tool calls needs"
                " a Metal kernel.",
                NO_SCHEMA,
            ),
        ),
        Server(
            "mlx-openai-server",
            (
                *("-m", "app.main", "launch", "--model-path", "{model}", "--model-type", "{kind}"),
                *("--port", "{port}", *LOOPBACK, "--no-log-file"),
            ),
            memory_arguments={
                Memory.NONE: ("--prompt-cache-size", "0"),
                Memory.ONE_SESSION: ("--max-bytes", "{memory_bytes}"),
            },
            package="mlx-openai-server==1.8.1",
            notes=(
                "It is installed without mflux, which makes images.",
                "It needs torch, which on Linux is gigabytes.",
                "A vision model answers nothing: it gives its mlx-vlm 0.4.4 an argument (kv_bits)"
                " that this does not know.",
            ),
        ),
        # The servers below were not tried here: they need a Mac, or models of their own.
        Server(
            "mtplx",
            (
                *("-m", "mtplx.cli", "serve", "--model", "{model}", "--port", "{port}"),
                *(*LOOPBACK, "--yes", "--ssd-session-cache-dir", "{dir}/ssd"),
            ),
            package="mtplx==2.12.2",
            notes=(
                "Untried: it computes on Macs alone, models that it has code of its own for.",
                "It has no option that switches its cache off, or bounds what it keeps in memory.",
            ),
        ),
        Server(
            "omlx",
            (
                *("serve", "--model-dir", "{models_dir}", "--port", "{port}", *LOOPBACK),
                *("--paged-ssd-cache-dir", "{dir}/ssd"),
            ),
            memory_arguments={
                Memory.NONE: ("--no-cache",),
                Memory.ONE_SESSION: ("--hot-cache-max-size", "{memory_mb}MB"),
            },
            program="omlx",
            model="{model_name}",
            notes=("Untried: it needs a Mac.",),
        ),
        Server(
            "splash",
            ("serve", "--model", "{model}", "--port", "{port}", *LOOPBACK),
            program="splash",
            notes=(
                "Untried: it needs an M3 and macOS 26, and serves two model families only.",
                "It has no meter, and no option that switches its cache off, or bounds what it"
                " keeps in memory.",
            ),
        ),
    )
}
