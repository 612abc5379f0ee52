"""Makes two machines of one: network namespaces with a cable between, and names of their own."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.helpers.servers.server import READY_S_MAX, Server

IP: Final = shutil.which("ip")
NEEDS_NAMESPACES: Final = pytest.mark.skipif(
    IP is None or os.geteuid() != 0, reason="network namespaces are Linux', and root's"
)
SERVER_ADDRESSES: Final = ("10.77.0.1", "fd77::1")
_NETNS: Final = Path("/etc/netns")  # `ip netns exec` shows NAME/hosts as /etc/hosts

# Asks for each row of its argument in turn, from the first time on that somebody listens.
CLIENT: Final = """
import json, sys, time, http.client
rows, wait_s = json.loads(sys.argv[1]), float(sys.argv[2])
deadline = time.monotonic() + wait_s
for name, port, method, path, headers, body in rows:
    while True:
        connection = http.client.HTTPConnection(name, port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    print(json.dumps([answer.status, answer.read().decode()]))
    connection.close()
"""
# Hands connections on to loopback, as Docker Desktop does for host.docker.internal.
FORWARDER: Final = """
import asyncio, sys
async def pump(reader, writer):
    while part := await reader.read(65536):
        writer.write(part)
        await writer.drain()
    writer.close()
async def take(reader, writer):
    there = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))
async def main():
    async with await asyncio.start_server(take, sys.argv[1], int(sys.argv[2])) as server:
        print("forwarding", flush=True)
        await server.serve_forever()
asyncio.run(main())
"""


@dataclass(frozen=True)
class Machine:
    """A namespace, in which commands run."""

    name: str

    def command(self, *words: str) -> list[str]:
        assert IP is not None
        return [IP, "netns", "exec", self.name, *words]

    def start_server(self, server: Server) -> None:
        """Start `server` here; it ends as ever."""
        words = [*self.command(sys.executable), "-m", "hearth.proxy.main"]
        server.start("-c", f"import os; os.execv({words[0]!r}, {words!r})")

    @contextlib.contextmanager
    def forwarding(self, port: int) -> Iterator[None]:
        """Have this machine's address lead to its loopback, on `port`."""
        command = self.command(sys.executable, "-c", FORWARDER, SERVER_ADDRESSES[0], str(port))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "forwarding\n"
                yield
            finally:
                process.terminate()

    def ask(self, *rows: tuple[Any, ...], wait_s: float = READY_S_MAX) -> list[tuple[int, str]]:
        """Return status and text for each of `rows`: name, port, method, path, headers, body."""
        told = self.run("-c", CLIENT, json.dumps(rows), str(wait_s))
        return [(status, text) for status, text in map(json.loads, told.splitlines())]

    def run(self, *arguments: str) -> str:
        """Return what Python prints here."""
        done = subprocess.run(
            self.command(sys.executable, *arguments), capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextlib.contextmanager
def two_machines(server_names: str, client_names: str) -> Iterator[tuple[Machine, Machine]]:
    """Give a machine for a server and one for a client, who know the server by these names."""
    server, client = (Machine(f"hearth-{os.getpid()}-{what}") for what in ("server", "client"))
    with contextlib.ExitStack() as made:
        for machine, names in ((server, server_names), (client, client_names)):
            made.enter_context(_machine(machine.name, names))
        ends = [f"hs{os.getpid()}", f"hc{os.getpid()}"]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for machine, end, last in ((server, ends[0], 1), (client, ends[1], 2)):
            _ip("link", "set", end, "netns", machine.name)
            within = ("-n", machine.name)
            _ip(*within, "address", "add", f"10.77.0.{last}/24", "dev", end)
            _ip(*within, "address", "add", f"fd77::{last}/64", "dev", end, "nodad")
            _ip(*within, "link", "set", end, "up")
            _ip(*within, "link", "set", "lo", "up")
        yield server, client


@contextlib.contextmanager
def _machine(name: str, names: str) -> Iterator[None]:
    """Make the namespace `name`, where the server's addresses have `names`."""
    hosts = _NETNS / name / "hosts"
    was_there = _NETNS.exists()
    hosts.parent.mkdir(parents=True)
    rows = [f"{address} {names}\n" for address in SERVER_ADDRESSES]
    hosts.write_text("127.0.0.1 localhost\n" + "".join(rows))
    _ip("netns", "add", name)
    try:
        yield
    finally:
        _ip("netns", "delete", name)  # which takes its end of the cable along
        shutil.rmtree(hosts.parent if was_there else _NETNS)


def _ip(*words: str) -> None:
    assert IP is not None
    subprocess.run([IP, *words], check=True, capture_output=True)
