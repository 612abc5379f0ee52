"""Writes this server into an agent's own settings, for good, or undoes that.

    hearth connect codex
    hearth connect codex --undo

The agents are claude (Claude Code), codex, opencode, pi, qwen (Qwen Code) and openclaw. The changes
are shown as a diff, and nothing is written before you agree. --undo gives each file back as it was,
byte for byte; where you have edited one since, it takes out what is ours and leaves the rest.
Exit status 0: done, or nothing to do; 1: you did not agree; 2: it cannot be done.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hearth.commands.agents import config_file, connection
from hearth.commands.agents.agent_setup import (
    KEY_VARIABLE,
    NO_KEY,
    Endpoint,
    Surroundings,
    key_file,
)
from hearth.commands.agents.agent_setups import AGENTS
from hearth.commands.agents.config_file import Content
from hearth.commands.agents.config_values import ConfigError
from hearth.commands.agents.connection import Change, ConnectedFile
from hearth.commands.agents.launch import CANNOT, about, endpoint_of
from hearth.commands.server.find_or_start import find_or_start
from hearth.shared.errors import StartError
from hearth.shared.paths import HOME_DIR, env_file
from hearth.shared.processes import url_of
from hearth.shared.settings_from_env import load_settings

DISAGREED: Final = 1


def connect(name: str, options: argparse.Namespace) -> int:
    """Raises: StartError, ConfigError."""
    agent, surroundings = AGENTS[name], _surroundings(name)
    endpoint, is_temporary = _found_endpoint(options)
    files = agent.config_files(endpoint, surroundings)
    before = connection.read_record(surroundings.directory)
    changes = connection.plan_connect(files, before)
    print(*about(agent, endpoint), sep="\n")
    # A key that changed is no change of the files that only say where it is.
    if all(change.now == change.then for change in changes):
        _write_key(endpoint, surroundings, changes)
        print(f"{agent.title} is set up for this server already.")
        return 0
    _show(changes, [endpoint.key, *_written_keys(surroundings, before)])
    if endpoint.key:
        where = next((file.path for file in files if file.holds_key), key_file(surroundings))
        print(f"The server's key will be in {where}, which only you can read then (mode 0600).")
    if not _agrees(options):
        return DISAGREED
    connection.write_record(surroundings.directory, changes)
    _write_key(endpoint, surroundings, changes)
    connection.apply(changes)
    print(f"{agent.title} asks this server from now on. Undo: hearth connect {name} --undo")
    if is_temporary:
        print("It needs a server that runs: `hearth service install` keeps one running.")
    return 0


def undo(name: str, options: argparse.Namespace) -> int:
    """Raises: ConfigError."""
    agent, surroundings = AGENTS[name], _surroundings(name)
    files = connection.read_record(surroundings.directory)
    if not files:
        print(f"{agent.title} is not connected: there is nothing to undo.")
        return 0
    changes = connection.plan_undo(files)
    _show(changes, _written_keys(surroundings, files))
    if any(change.now != change.then for change in changes) and not _agrees(options):
        return DISAGREED
    connection.apply(changes)
    for each in (key_file(surroundings), surroundings.directory / connection.RECORD):
        each.unlink(missing_ok=True)
    connection.remove_directories(files)
    with contextlib.suppress(OSError):  # another agent is connected
        surroundings.directory.rmdir()
        surroundings.directory.parent.rmdir()
    for change in changes:
        for entry in change.kept:
            place = ".".join(str(key) for key in entry.keys)
            print(f"{change.path}: {place} was changed since and stays as it is.")
    print(f"{agent.title} is as it was before.")
    return 0


def _surroundings(name: str) -> Surroundings:
    return Surroundings(Path.home(), os.environ, HOME_DIR / "connect" / name)


def _found_endpoint(options: argparse.Namespace) -> tuple[Endpoint, bool]:
    """Return the server that runs; else what one that is started for this says, and true."""
    settings = load_settings(os.environ, env_file())
    with find_or_start(settings, options.model) as server:
        endpoint = endpoint_of(server)
    if endpoint.base_url != url_of(settings.proxy_host, settings.proxy_port):
        raise StartError(
            f"Nothing is written: another program has port {settings.proxy_port}, and would be "
            "sent all that the agent sends. Set PROXY_PORT to a port that is free, or end it."
        )
    return endpoint, server.is_ours


def _written_keys(surroundings: Surroundings, files: Sequence[ConnectedFile]) -> list[str]:
    """Return the server's keys that a former connect has written."""
    held = (config_file.read(key_file(surroundings)).data or b"").decode(errors="replace")
    entries = [entry for file in files for entry in file.entries]
    named = [str(entry.value) for entry in entries if entry.keys[-1] == KEY_VARIABLE]
    return [held, *(key for key in named if key != NO_KEY)]


def _show(changes: Sequence[Change], secrets: Sequence[str]) -> None:
    for change in changes:
        if diff := connection.diff_of(change, secrets):
            print(diff)


def _write_key(endpoint: Endpoint, surroundings: Surroundings, changes: Sequence[Change]) -> None:
    """Keep the key for agents that read it in a file of ours. Raises: ConfigError."""
    named = str(key_file(surroundings)).encode()
    if endpoint.key and any(named in (change.then.data or b"") for change in changes):
        config_file.write(key_file(surroundings), Content(endpoint.key.encode()))


def _agrees(options: argparse.Namespace) -> bool:
    """Whether the user agrees. Raises: StartError: nobody is there to ask."""
    if options.yes:
        return True
    if not sys.stdin.isatty():
        raise StartError("Nothing is written: there is no terminal to ask in. Add --yes.")
    try:
        return input("Write this? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hearth connect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("agent", metavar="AGENT", choices=AGENTS, help=", ".join(AGENTS))
    parser.add_argument("--model", default="", help="default the first that the server lists")
    parser.add_argument("--undo", action="store_true", help="give its files back as they were")
    parser.add_argument("--yes", action="store_true", help="write without asking")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    try:
        return (undo if options.undo else connect)(options.agent, options)
    except (StartError, ConfigError) as error:
        print(error, file=sys.stderr)
        return CANNOT


if __name__ == "__main__":
    sys.exit(main())
