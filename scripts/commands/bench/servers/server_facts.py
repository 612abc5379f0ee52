"""Tells a reader what a server is that `hearth bench` has measured, and how it was started."""

from hearth.commands.bench.results import ServerFacts
from hearth.commands.bench.server import Memory, Server
from hearth.commands.bench.servers.found_servers import AS_STARTED


def command_of(server: Server, memory: Memory = Memory.DEFAULT) -> str:
    """Return the command as a reader would type it, with {model}, {port} and {dir}."""
    if server.url:
        return AS_STARTED
    environment = {**server.environment, **server.memory_environment.get(memory, {})}
    words = [f"{name}={value}" for name, value in environment.items()]
    words += [server.program or "python", *server.arguments]
    return " ".join((*words, *server.memory_arguments.get(memory, ())))


def facts_of(
    server: Server, version: str, *, is_metered: bool, notes: tuple[str, ...] = ()
) -> ServerFacts:
    """Return what is told of a server; `notes` are of this run, as that it does not start."""
    return ServerFacts(
        server.name, version, command_of(server), is_metered, (*server.notes, *notes)
    )
