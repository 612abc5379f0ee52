"""Installs, starts and watches the servers that `python -m scripts.bench peers` compares.

Each runs with its own defaults, but drafts nothing, in a home of its own that a restart finds
again, beside the meter that counts what it really reads. What one does not start with is told, not
worked around.
"""

import contextlib
import subprocess
import sys
import venv
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

from hearth.commands.replay.player import Target
from scripts.bench.attention_counter.sitecustomize import COUNT
from scripts.bench.cache import KEY, REQUEST_WAIT_S_MAX, THINKING
from scripts.bench.servers import (
    SideError,
    free_port,
    mlx_environment,
    ready,
    running,
)
from scripts.chaos.own_server import MB, rss_bytes

METER_DIR: Final = Path(__file__).resolve().parent / "attention_counter"
VENVS_DIR: Final = Path("~/.cache/hearth-peers").expanduser()
INSTALL_WAIT_S_MAX: Final = 600
# No text model needs them, and they are gigabytes.
LEFT_OUT: Final = ("torch", "torchvision")
PLATFORM_MLX: Final = "mlx" if sys.platform == "darwin" else "mlx[cpu]"
# Rapid-MLX guides tool calls by a Metal kernel: without Metal each request with tools fails.
RAPID_WITHOUT_METAL: Final = () if sys.platform == "darwin" else ("--no-tool-call-parser",)
HEARTH: Final = "hearth"


@dataclass(frozen=True, slots=True)
class Peer:
    """How one server is started. `{model}`, `{port}`, `{dir}` stand for those of a run."""

    name: str
    arguments: tuple[str, ...] = ()  # of Python
    environment: Mapping[str, str] = field(default_factory=dict)
    cold: tuple[str, ...] = ()  # arguments that switch the cache off
    cold_environment: Mapping[str, str] = field(default_factory=dict)
    package: str = ""  # name==version, in a virtual environment of its own; "" = in Hearth's
    extra: Mapping[str, Any] = field(default_factory=lambda: THINKING)  # for every body
    model: str = ""  # empty = the first that the server lists
    is_chat_only: bool = False
    url: str = ""  # of a server that somebody else started

    def command(self, is_cold: bool = False) -> str:
        """Return the command as a reader would type it."""
        if self.url:
            return f"(as started by its owner at {self.url})"
        environment = {**self.environment, **(self.cold_environment if is_cold else {})}
        words = [f"{name}={value}" for name, value in environment.items()]
        words += ["python", *self.arguments, *(self.cold if is_cold else ())]
        return " ".join(words)

    def told_version(self) -> str:
        """Return what is compared: the package, and the mlx-lm that it computes with."""
        if self.url:
            return "not known"
        if not self.package:
            name = {"mlx_lm": "mlx-lm", "mlx_vlm": "mlx-vlm"}.get(self.name, "mlx-lm")
            return f"{name} {version(name)}"
        sites = [str(path) for path in self.venv_dir.glob("lib/python*/site-packages")]
        found = {each.name: each.version for each in distributions(path=sites)}
        return f"{self.package.replace('==', ' ')}, mlx-lm {found.get('mlx-lm', '?')}"

    @property
    def venv_dir(self) -> Path:
        return VENVS_DIR / self.package

    @property
    def python(self) -> str:
        return str(self.venv_dir / "bin" / "python") if self.package else sys.executable


PEERS: Final = {
    peer.name: peer
    for peer in (
        Peer(
            HEARTH,
            ("-m", "hearth.proxy.main"),
            {
                "MODEL_PATH": "{model}",
                "PROXY_HOST": "127.0.0.1",
                "PROXY_PORT": "{port}",
                # The meter would take the forwards that verify drafts for prefill.
                "SPECULATE": "off",
                "PROXY_API_KEY": KEY,
                "CACHE_DEBUG": "true",
                "WORKERS": "1",
                "RUN_DIR": "{dir}/run",
                "LOG_ROOT": "{dir}/logs",
                "KV_CACHE_DIR": "{dir}/kv",
            },
            cold_environment={"USE_KV_CACHE": "false"},
            extra={},
        ),
        Peer(
            "mlx_lm",
            ("-m", "mlx_lm", "server", "--model", "{model}", "--port", "{port}"),
            cold=("--prompt-cache-size", "0"),
            model="default_model",
            is_chat_only=True,
        ),
        Peer(
            "mlx_vlm",
            ("-m", "mlx_vlm.server", "--model", "{model}", "--port", "{port}"),
            {"APC_ENABLED": "1", "APC_DISK_PATH": "{dir}/apc"},
            cold_environment={"APC_ENABLED": "0"},
        ),
        Peer(
            "vllm-mlx",
            # The engine that it takes without this flag has no prefix cache but of system prompts.
            ("-m", "vllm_mlx.cli", "serve", "{model}", "--port", "{port}", "--continuous-batching"),
            cold=("--disable-prefix-cache",),
            package="vllm-mlx==0.6.0",
        ),
        Peer(
            "rapid-mlx",
            ("-m", "rapid_mlx.cli", "serve", "{model}", "--port", "{port}", *RAPID_WITHOUT_METAL),
            cold=("--disable-prefix-cache",),
            package="rapid-mlx==0.16.10",
        ),
    )
}


# ---------------------------------------------------------------- installing


def install(peer: Peer) -> None:
    """Make the peer's virtual environment where it is missing.

    uv makes it, for pip cannot leave a dependency out.

    Raises:
        SideError: it cannot be installed here; the text says why.
    """
    if not peer.package or Path(peer.python).exists():
        return
    uv_dir = VENVS_DIR / "uv"
    uv = str(uv_dir / "bin" / "uv")
    if not Path(uv).exists():
        venv.create(uv_dir, with_pip=True)
        _install_step(peer, [str(uv_dir / "bin" / "pip"), "install", "--quiet", "uv"])
    override = uv_dir / "override.txt"
    override.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in LEFT_OUT))
    made = peer.venv_dir.with_name(f"{peer.package}.part")
    _install_step(peer, [uv, "venv", "--quiet", "--clear", "--relocatable", str(made)])
    command = [uv, "pip", "install", "--quiet", "--python", str(made / "bin" / "python")]
    _install_step(peer, [*command, "--override", str(override), peer.package, PLATFORM_MLX])
    made.rename(peer.venv_dir)


def _install_step(peer: Peer, command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_WAIT_S_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SideError(f"{peer.package} cannot be installed: {error}") from error
    if done.returncode:
        raise SideError(f"{peer.package} cannot be installed: {done.stderr.strip()[-300:]}")


# ---------------------------------------------------------------- running


@dataclass(slots=True)
class Running:
    """A server that answers. `directory` is None where somebody else started it."""

    target: Target
    directory: Path | None = None
    pid: int = 0

    def read_units(self) -> int:
        """Return what the meters of its processes have counted; 0 where it has none."""
        if self.directory is None:
            return 0
        pages = [path.read_bytes() for path in (self.directory / "meter").iterdir()]
        return sum(COUNT.unpack(page)[0] for page in pages if len(page) == COUNT.size)

    def memory_mb(self) -> float | None:
        """Return what its processes hold."""
        if not self.pid:
            return None
        try:
            first = psutil.Process(self.pid)
            family = [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return None
        return sum(rss_bytes(process) for process in family) / MB


@contextlib.asynccontextmanager
async def started(
    peer: Peer, model: Path, directory: Path, tokens_max: int, is_cold: bool = False
) -> AsyncIterator[Running]:
    """Run `peer` for the length of the block; `directory` is all that a restart finds again.

    Raises:
        SideError: it is not ready in time; the text is the end of what it said.
    """
    target = Target(
        peer.url,
        KEY,
        peer.model,
        tokens_max=tokens_max,
        timeout_s=REQUEST_WAIT_S_MAX,
        is_chat_only=peer.is_chat_only,
        extra=peer.extra,
    )
    if peer.url:
        yield Running(target)
        return
    (directory / "meter").mkdir(parents=True, exist_ok=True)
    port, log = free_port(), directory / f"{peer.name}.log"
    given = {"model": str(model), "port": str(port), "dir": str(directory)}
    arguments = [*peer.arguments, *(peer.cold if is_cold else ())]
    environment = {**peer.environment, **(peer.cold_environment if is_cold else {})}
    target = replace(target, base_url=f"http://127.0.0.1:{port}")
    async with running(
        [each.format(**given) for each in arguments],
        {
            **mlx_environment(),
            "HOME": str(directory),
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "PYTHONPATH": str(METER_DIR),
            "METER_DIR": str(directory / "meter"),
            **{name: value.format(**given) for name, value in environment.items()},
        },
        log,
        python=peer.python,
    ) as child:
        async with aiohttp.ClientSession(target.base_url) as session:
            await ready(session, child, log)
        yield Running(target, directory, child.pid)
