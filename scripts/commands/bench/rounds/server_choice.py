"""Chooses which servers are measured, and installs those that are missing once that is agreed."""

import asyncio
from collections.abc import Mapping, Sequence

from hearth.commands.bench.results import HEARTH, Results
from hearth.commands.bench.rounds.error_texts import error_text
from hearth.commands.bench.rounds.plan import ChosenServer
from hearth.commands.bench.server import Server
from hearth.commands.bench.servers.found_servers import server_of_url, version_of
from hearth.commands.bench.servers.install_server import (
    ENVIRONMENTS_DIR,
    InstallError,
    can_install,
    install,
    install_bytes,
    is_installed,
)
from hearth.commands.bench.servers.server_facts import facts_of
from hearth.shared.errors import StartError


def by_url(texts: Sequence[str]) -> list[Server]:
    """Return the servers of `--server NAME=URL`.

    Raises:
        StartError: one is not written so.
    """
    try:
        return [server_of_url(text) for text in texts]
    except ValueError as error:
        raise StartError(f"--server: {error}") from None


def chosen_servers(
    names: Sequence[str],
    urls: Sequence[Server],
    known: Mapping[str, Server],
    *,
    is_quick: bool,
) -> list[ChosenServer]:
    """Return the servers that are measured, Hearth first: the others are compared with it.

    Without names all that are here or can be installed; a quick run installs nothing unasked.

    Raises:
        StartError: no server has one of the names, two have one name, or none is left.
    """
    if odd := sorted(set(names) - set(known)):
        raise StartError(f"No server is called {', '.join(odd)}; there are {', '.join(known)}.")
    wanted = [known[name] for name in dict.fromkeys(names)] or [
        server
        for server in known.values()
        if is_installed(server) or (can_install(server) and not is_quick)
    ]
    servers = [*wanted, *urls]
    every = [server.name for server in servers]
    if twice := sorted({name for name in every if every.count(name) > 1}):
        raise StartError(f"Two servers are called {', '.join(twice)}. Give one another name.")
    if absent := [each.name for each in servers if not (is_installed(each) or can_install(each))]:
        raise StartError(f"{', '.join(absent)} cannot be installed by this command; do so first.")
    servers.sort(key=lambda server: server.name != HEARTH)
    return [_chosen(server) for server in servers]


def _chosen(server: Server) -> ChosenServer:
    if is_installed(server):
        # By URL it is what the server says.
        return ChosenServer(server, error_text(asyncio.run(version_of(server)), {}))
    return ChosenServer(server, server.package.replace("==", " "), install_bytes(server))


def with_installed(chosen: Sequence[ChosenServer], results: Results) -> list[Server]:
    """Install what is missing; return what can be measured. What cannot is a note in `results`."""
    there = []
    for each in chosen:
        server = each.server
        notes: tuple[str, ...] = ()
        try:
            install(server)
            there.append(server)
            version = error_text(asyncio.run(version_of(server)), {})
        except InstallError as error:
            version = each.version
            notes += (error_text(str(error), {ENVIRONMENTS_DIR: "{environments}"}),)
        # A start tells whether it is metered.
        results.servers[server.name] = facts_of(server, version, is_metered=False, notes=notes)
    return there
