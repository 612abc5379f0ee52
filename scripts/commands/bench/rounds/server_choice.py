"""Chooses which servers are measured, and installs those that are missing once that is agreed."""

from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from hearth.commands.bench.results import HEARTH, Results, ServerFacts
from hearth.commands.bench.rounds.error_texts import error_text
from hearth.commands.bench.rounds.plan import ChosenServer
from hearth.commands.bench.server import Server
from hearth.commands.bench.servers.install_server import (
    ENVIRONMENTS_DIR,
    INSTALLED_BYTES,
    InstallError,
    can_install,
    install,
    is_installed,
    told_version,
)
from hearth.shared.errors import StartError

_NAMED: Final = "NAME=URL, as mine=http://127.0.0.1:8000"


def by_url(texts: Sequence[str]) -> list[Server]:
    """Return the servers of `--server NAME=URL`.

    Raises:
        StartError: one is not written so.
    """
    servers = []
    for text in texts:
        name, _, url = text.partition("=")
        told = urlsplit(url)
        if not name.strip() or told.scheme not in ("http", "https") or not told.hostname:
            raise StartError(f"--server {text} is not {_NAMED}")
        servers.append(Server(name.strip(), url=url.rstrip("/").removesuffix("/v1")))
    return servers


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
        return ChosenServer(server, told_version(server))
    return ChosenServer(server, server.package.replace("==", " "), INSTALLED_BYTES)


def with_installed(chosen: Sequence[ChosenServer], results: Results) -> list[Server]:
    """Install what is missing; return what can be measured. What cannot is a note in `results`."""
    there = []
    for each in chosen:
        server = each.server
        notes: tuple[str, ...] = server.notes
        try:
            install(server)
            there.append(server)
            version = told_version(server)
        except InstallError as error:
            version = each.version
            notes += (error_text(str(error), {ENVIRONMENTS_DIR: "{environments}"}),)
        results.servers[server.name] = ServerFacts(
            name=server.name,
            version=version,
            command=command_text(server),
            is_metered=False,  # a start tells
            notes=notes,
        )
    return there


def command_text(server: Server) -> str:
    """Return the command as a reader would type it."""
    if server.url:
        return "(as its owner started it)"
    words = [f"{name}={value}" for name, value in server.environment.items()]
    return " ".join([*words, server.program or "python", *server.arguments])
