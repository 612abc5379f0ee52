"""Starts an agent that is set up for this server, and leaves its own configuration as it is.

    hearth launch claude
    hearth launch codex --model qwen3-8b -- exec "What is in this folder?"

The agents are claude (Claude Code), codex, opencode, pi, qwen (Qwen Code) and openclaw. What stands
after -- is for the agent. Variables and temporary files set it up, with the context that fits; its
user's own settings apply beside them. A server is started for it where none runs.
Exit status: the agent's; 2: it is not installed, its first prompt does not fit the model's context,
or there is no server for it.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final
from urllib.parse import urlsplit

from hearth.commands.agents.agent_setup import Agent, Endpoint, Launch, Surroundings, answer_tokens
from hearth.commands.agents.agent_setups import AGENTS
from hearth.commands.server.find_or_start import RunningServer, find_or_start
from hearth.shared.errors import StartError
from hearth.shared.machine import bytes_for_models
from hearth.shared.models.model_path import recommended
from hearth.shared.paths import env_file
from hearth.shared.processes import process_started
from hearth.shared.settings import load_settings

CANNOT: Final = 2
EARLY_FACTOR: Final = 5  # an agent compacts early in a context of less than so many first prompts
MORE: Final = (
    "Less is kept of other models, or a smaller one has more (docs/settings.md: MAX_KV_SIZE)."
)
FORWARDED: Final = (signal.SIGTERM, signal.SIGHUP)
DIRECTORY: Final = "hearth-launch-"  # of the temporary files; the pid of their command follows


def endpoint_of(server: RunningServer) -> Endpoint:
    return Endpoint(
        server.base_url, server.key, server.model, server.context_tokens, server.takes_images
    )


def about(agent: Agent, endpoint: Endpoint) -> list[str]:
    """Return what is said of a setup: the model, its context, and what does not go well."""
    context = endpoint.context_tokens
    fits = f" with {context:,} tokens of context" if context else ""
    lines = [f"{agent.title} asks {endpoint.model} at {endpoint.base_url}{fits}."]
    first = agent.first_prompt_tokens
    if context and context < EARLY_FACTOR * first:
        lines.append(f"Its first prompt takes {first:,} of them, so it will compact early. {MORE}")
    return lines


def check_first_prompt(command: str, name: str, model: str, context_tokens: int | None) -> None:
    """Refuse `hearth COMMAND NAME` where the context has no room for a first prompt and an answer.

    Raises: StartError: with both sizes, and the model to take on this machine.
    """
    title, first = AGENTS[name].title, AGENTS[name].first_prompt_tokens
    answer = answer_tokens(context_tokens or 0)
    if not context_tokens or first + answer <= context_tokens:
        return
    better = recommended(bytes_for_models())
    remedy = MORE
    if better is not None and model not in (better.alias, better.hub_id):
        remedy = f"hearth {command} {name} --model {better.alias}"
    raise StartError(
        f"{title}'s first prompt is {first:,} tokens or more, and {model} takes "
        f"{context_tokens:,}, of which an answer may be {answer:,}: {remedy}"
    )


def environment_of(launch: Launch, environ: Mapping[str, str], base_url: str) -> dict[str, str]:
    """Return the environment of the agent: its user's, with what `launch` sets and removes.

    An HTTP proxy of the user does not stand before the server at `base_url`.
    """
    kept = {name: text for name, text in environ.items() if name not in launch.removed}
    direct = {}
    if any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in kept):
        names = [kept.get("NO_PROXY") or kept.get("no_proxy"), urlsplit(base_url).hostname]
        direct = dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(filter(None, names)))
    return {**kept, **direct, **launch.environment}


def write_files(launch: Launch, directory: Path) -> None:
    for name, text in launch.files.items():
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Give a directory that only this user reads; those of commands that were killed go first."""
    for left in Path(tempfile.gettempdir()).glob(f"{DIRECTORY}*-*"):
        pid = left.name.removeprefix(DIRECTORY).partition("-")[0]
        if pid.isdecimal() and process_started(int(pid)) is None:
            shutil.rmtree(left, ignore_errors=True)  # they may hold a key
    with tempfile.TemporaryDirectory(prefix=f"{DIRECTORY}{os.getpid()}-") as directory:
        yield Path(directory)


def run_agent(binary: str, launch: Launch, given: Sequence[str], base_url: str) -> int:
    """Run the agent in this terminal; return its exit status, as a shell tells it.

    Raises:
        StartError: the system does not start it.
    """
    command = [binary, *launch.arguments, *(given or launch.default_arguments)]
    with _signals_for_child() as forward_to:
        try:
            environment = environment_of(launch, os.environ, base_url)
            process = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise StartError(f"{binary} cannot be started: {error.strerror}.") from None
        forward_to(process)
        status = process.wait()
    return status if status >= 0 else 128 - status


@contextmanager
def _signals_for_child() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Leave Ctrl-C to the agent, which is in the same terminal, and pass on what ends us.

    Also what came while the agent was being started.
    """
    children: list[subprocess.Popen[bytes]] = []
    came: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        came.append(number)
        for child in children:
            child.send_signal(number)

    def forward_to(child: "subprocess.Popen[bytes]") -> None:
        children.append(child)
        for number in came:
            child.send_signal(number)

    def nothing(_number: int, _: FrameType | None) -> None:
        """A handler, not SIG_IGN: that a child would inherit."""

    handlers = {number: forward for number in FORWARDED} | {signal.SIGINT: nothing}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield forward_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def launch(options: argparse.Namespace) -> int:
    """Raises: StartError: the agent cannot be started."""
    agent = AGENTS[options.agent]
    binary = shutil.which(agent.binary)
    if binary is None:
        raise StartError(
            f"{agent.title} is not installed: there is no {agent.binary} on PATH. Install it: "
            f"npm install -g {agent.package}"
        )
    settings = load_settings(os.environ, env_file())
    check = partial(check_first_prompt, "launch", options.agent)
    with (
        find_or_start(settings, options.model, check=check) as server,
        temporary_directory() as directory,
    ):
        endpoint = endpoint_of(server)
        surroundings = Surroundings(Path.home(), os.environ, directory)
        setup = agent.launch(endpoint, surroundings)
        write_files(setup, surroundings.directory)
        lines = about(agent, endpoint)
        if agent.apart:
            lines.append(f"Your own settings apply beside this; {agent.apart}.")
        print(*lines, sep="\n", file=sys.stderr, flush=True)
        return run_agent(binary, setup, options.arguments, endpoint.base_url)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    given = list(sys.argv[1:] if arguments is None else arguments)
    ours, theirs = given, []
    if "--" in given:
        at = given.index("--")
        ours, theirs = given[:at], given[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="hearth launch",
        usage="hearth launch [-h] [--model MODEL] AGENT [-- ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("agent", metavar="AGENT", choices=AGENTS, help=", ".join(AGENTS))
    parser.add_argument("--model", default="", help="default the first that the server lists")
    options, unknown = parser.parse_known_args(ours)
    if unknown:
        start = f"hearth launch {options.agent} -- {shlex.join(unknown)}"
        parser.error(f"what is for the agent stands behind --, as in: {start}")
    options.arguments = theirs
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return launch(options_of(arguments))
    except StartError as error:
        print(error, file=sys.stderr)
        return CANNOT


if __name__ == "__main__":
    sys.exit(main())
