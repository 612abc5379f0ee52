"""Finds servers that somebody else has started: on this machine's well-known ports, or by URL.

They are asked, and neither stopped nor metered: their tokens are what they say.
"""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from hearth.commands.bench.server import KEY, THINKING, Server
from hearth.commands.bench.servers.install_server import told_version
from hearth.commands.stream_client import body_of

ASK_S_MAX: Final = 2.0
AS_STARTED: Final = "(as its owner has started it)"
BY_URL: Final = "It is not metered: its tokens read are what it says."


@dataclass(frozen=True, slots=True)
class PortSign:
    """Where a server listens unless told otherwise, and by which answer it is known."""

    name: str
    port: int
    path: str  # what only it answers
    key: str  # of the answer's JSON object
    version: str = ""  # the key that tells its version, where it does


SIGNS: Final = (
    PortSign("ollama", 11434, "/api/version", "version", "version"),
    PortSign("lm-studio", 1234, "/api/v0/models", "data"),
    PortSign("llama-server", 8080, "/props", "default_generation_settings", "build_info"),
)


async def found_servers(signs: Sequence[PortSign] = SIGNS) -> list[Server]:
    """Return the servers of others that answer on this machine, each with its first model."""
    found = await asyncio.gather(*(_found(sign) for sign in signs))
    return [server for server in found if server is not None]


async def _found(sign: PortSign) -> Server | None:
    url = f"http://127.0.0.1:{sign.port}"
    told = await json_of(url + sign.path)
    if told is None or sign.key not in told:
        return None
    return Server(sign.name, url=url, extra=THINKING, notes=(BY_URL,))


def server_of_url(text: str) -> Server:
    """Return the server that `NAME=URL` names; `NAME=URL#MODEL` where it serves several models.

    Raises:
        ValueError: it is not of that form.
    """
    name, equals, url = text.partition("=")
    url, _, model = url.partition("#")
    parts = urlsplit(url)
    if not (name and equals and parts.scheme in ("http", "https") and parts.netloc):
        raise ValueError(f"{text} is not NAME=URL, as mine=http://127.0.0.1:8000")
    if "@" in parts.netloc:
        raise ValueError(f"the URL of {name} has a name or a key in it, which would be published")
    base = url.rstrip("/").removesuffix("/v1")
    return Server(name, url=base, model=model, notes=(BY_URL,))


async def version_of(server: Server) -> str:
    """Return what is measured: of packages by their metadata, by URL as the server tells it."""
    if not server.url:
        return told_version(server)
    for sign in (*SIGNS, PortSign("hearth", 0, "/health", "version", "version")):
        told = await json_of(server.url + sign.path)
        if told is not None and sign.key in told and isinstance(told.get(sign.version), str):
            return str(told[sign.version])
    return "not known"


async def json_of(url: str) -> Mapping[str, Any] | None:
    timeout = aiohttp.ClientTimeout(total=ASK_S_MAX)
    headers = {"authorization": f"Bearer {KEY}"}
    with contextlib.suppress(
        aiohttp.ClientError, TimeoutError, ValueError, RecursionError, OSError
    ):
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            told = json.loads(await body_of(response))
            return told if response.status == 200 and isinstance(told, dict) else None
    return None
