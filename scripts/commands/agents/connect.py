"""Prints how an agent is set up for this server for good: what to put where. It edits no file.

    hearth connect codex

The agents are claude (Claude Code), codex, opencode, pi, qwen (Qwen Code) and openclaw. What an
earlier version wrote into their files is listed first, to be taken out.
Exit status 0: it is printed; 2: there is no server to set it up for, or the agent's first prompt
does not fit the model's context.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hearth.commands.agents.agent_setup import Agent, Endpoint, Surroundings
from hearth.commands.agents.agent_setups import AGENTS
from hearth.commands.agents.earlier_edits import lines_about
from hearth.commands.agents.launch import CANNOT, about, check_first_prompt, endpoint_of
from hearth.commands.server.find_or_start import find_or_start
from hearth.shared.errors import StartError
from hearth.shared.listen_addresses import url_of
from hearth.shared.paths import HOME_DIR, env_file
from hearth.shared.settings import load_settings


def connect(options: argparse.Namespace) -> int:
    """Raises: StartError."""
    agent = AGENTS[options.agent]
    surroundings = Surroundings(Path.home(), os.environ, HOME_DIR / "connect" / options.agent)
    if earlier := lines_about(surroundings.directory):
        print("An earlier version wrote these, which are to be taken out:")
        print(*(f"  {line}" for line in earlier), sep="\n", end="\n\n", flush=True)
    settings = load_settings(os.environ, env_file())
    check = partial(check_first_prompt, "connect", options.agent)
    with find_or_start(settings, options.model, check=check) as server:
        endpoint = endpoint_of(server)
    if endpoint.base_url != url_of(settings.proxy_host, settings.proxy_port):
        raise StartError(
            f"Another program has port {settings.proxy_port}, and would be sent all that the agent "
            "sends. Set PROXY_PORT to a port that is free, or end it."
        )
    print(*about(agent, endpoint), "", *setup_lines(agent, endpoint, surroundings), sep="\n")
    if server.is_ours:
        print("It needs a server that runs: `hearth service install` keeps one running.")
    return 0


def setup_lines(agent: Agent, endpoint: Endpoint, surroundings: Surroundings) -> list[str]:
    """Return what to put where; the server's key is in none of it."""
    lines = []
    for each in agent.config_texts(endpoint, surroundings):
        is_there = each.path.exists()
        what = "Merge into" if is_there else "Put into"
        lines += [f"{what} {each.path}:", each.text]
        if is_there and each.remark:
            lines += [each.remark, ""]
    if endpoint.key:
        lines += [
            f"Set in the shell that starts {agent.binary}, with the server's key (PROXY_API_KEY):",
            f"export {agent.key_variable}=YOUR_KEY",
            "",
        ]
    return lines


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hearth connect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("agent", metavar="AGENT", choices=AGENTS, help=", ".join(AGENTS))
    parser.add_argument("--model", default="", help="default the first that the server lists")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(
            f"there is no {' '.join(unknown)}: connect edits no file, and lists what an earlier "
            "version wrote"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return connect(options_of(arguments))
    except StartError as error:
        print(error, file=sys.stderr)
        return CANNOT


if __name__ == "__main__":
    sys.exit(main())
