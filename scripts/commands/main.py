"""Runs the command line: `hearth COMMAND ...` calls the module of that name's command.

A command's module is imported when it is called, so that `hearth --help` and `hearth top` import
neither MLX nor LiteLLM.
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Final

from hearth.shared.version import VERSION


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: the module whose `main(arguments)` returns its exit status, and a line."""

    module: str
    about: str


COMMANDS: Final = {
    "serve": Command("serve", "starts the server and its workers"),
    "models": Command("models.list_models", "lists models: on this disk, and for this machine"),
    "pull": Command("models.pull_model", "fetches a model, checked, if it fits this machine"),
    "rm": Command("models.remove_model", "removes a fetched model"),
    "run": Command("chat.command", "talks with a model in the terminal"),
    "worker": Command("worker.command", "runs a worker for proxies on other machines"),
    "service": Command("service.command", "runs the server from login on (launchd, systemd)"),
    "check": Command("check", "says whether a start would succeed: packages, settings, port"),
    "launch": Command("agents.launch", "starts an agent set up for this server"),
    "connect": Command("agents.connect", "writes this server into an agent's settings"),
    "doctor": Command("doctor", "checks the model on this machine, and says what auto means"),
    "top": Command("top", "shows what a running server does, once a second"),
    "why": Command("why", "says why requests of a session lost what was kept"),
    "cache": Command("inspect_cache", "shows what a server's workers keep"),
    "probe": Command("probe_cache", "checks a server's prefix cache with short conversations"),
    "probe-agent": Command("probe_agent", "plays an agent and checks what each request prefills"),
    "eval": Command("eval_answers", "checks on questions that the cache changes no answer"),
    "bench": Command("bench.rounds.command", "measures this server beside others, on your models"),
    "diff-turns": Command("diff_turns", "shows a session's requests beside the ones before them"),
    "ranks": Command("ranks.command", "joins a model over several machines, or checks one"),
    "keys": Command("make_keys", "makes the keys that processes on other machines need"),
}


def parser_of_all() -> argparse.ArgumentParser:
    """Return the parser of what stands before a command's own arguments."""
    lines = [f"  {name:12} {command.about}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="hearth",
        usage="hearth [-h] [--version] COMMAND ...",
        description="A local LLM server for agents: no token is ever prefilled twice.",
        epilog="\n".join(["commands:", *lines, "", "hearth COMMAND --help tells of each one."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hearth {VERSION}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` name; return its exit status."""
    options = parser_of_all().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal cannot show is shown as "?"
    try:
        module = importlib.import_module(f"hearth.commands.{COMMANDS[options.command].module}")
        status: int = module.main(options.arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


if __name__ == "__main__":
    sys.exit(main())
