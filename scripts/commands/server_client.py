"""Holds what the probe commands share: server requests, counters, a session's rows, verdicts.

A probe ends with 0 where its verdict is good, 1 where something missed it, 2 where the server (or
the log) told nothing to judge by.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import aiohttp

from hearth.commands.stream_client import (
    ERROR_CHARS_MAX,
    ODD_FORM,
    Tokens,
    body_of,
    chunks_of,
    send,
)
from hearth.commands.terminal_text import plain, plain_lines

COUNTERS: Final = (
    "exact_key_rejected_by_model_lcp",
    "canonical_drift",
    "hybrid_trim_miss",
    "vlm_retreat",
)
CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
CELL_CHARS_MAX: Final = 200  # of a table: a client may have chosen what is in it
MISSES_TOLD_MAX: Final = 5  # by a verdict
# A line whose every request costs only what is new in it stays within this: 16 tokens, and a
# generation prompt of 8.
SLACK_TOKENS: Final = 24
CHUNK_TOKENS_MAX: Final = 2048  # between two cuts of a prefill, at the default PREFILL_CHUNK
# What a loss is put down to when nobody knows.
_NO_CAUSES: Final = frozenset(("", "unknown", "unexplained"))

Row = dict[str, Any]


class ProbeError(Exception):
    """There is nothing to judge by: no server, no session, no log."""


class Refused(ProbeError):
    """The server answered with another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class Answer:
    """What one request cost, and what was said."""

    tokens: Tokens
    text: str
    reasoning: str
    calls: list[Row]  # as chat completions have them, arguments joined


# ---------------------------------------------------------------- asking


@dataclass(slots=True)
class Server:
    """One server, asked as one client. Use as a context manager; Raises: ProbeError throughout."""

    base_url: str
    key: str = "local"
    model: str = ""  # empty = the first that the server lists
    timeout_s: float = 600.0
    _session: aiohttp.ClientSession | None = field(default=None, init=False)

    async def __aenter__(self) -> "Server":
        headers = {"authorization": f"Bearer {self.key}", "x-api-key": self.key}
        self._session = aiohttp.ClientSession(
            self.base_url.rstrip("/"),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self.timeout_s),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(self, path: str) -> Row:
        return await self._json("GET", path, None, {})

    async def post(self, path: str, body: Row, headers: Mapping[str, str]) -> Row:
        return await self._json("POST", path, body, headers)

    async def count(self, body: Row) -> int:
        """Return the prompt tokens of a Messages body, generation prompt included."""
        body = {**body, "model": await self.model_name()}
        told = await self.post(f"{MESSAGES}/count_tokens", body, {})
        tokens: int = told["input_tokens"]
        return tokens

    async def counters(self) -> dict[str, int]:
        """Return COUNTERS, each summed over all workers; one that never rose is not told."""
        counts = [counts_of(row) for row in (await self.get("/v1/cache"))["workers"]]
        return {name: sum(figure(row, name) for row in counts) for name in COUNTERS}

    async def lines(self, session: str) -> list["Line"]:
        """Return what the workers remember of `session`."""
        told = await self.get(f"/v1/sessions/{quote(session, safe='')}")
        return [
            Line(session, _line_name(row), row.get("kind") or "", row.get("requests") or [])
            for row in told["lines"]
        ]

    async def model_name(self) -> str:
        if not self.model:
            self.model = (await self.get("/v1/models"))["data"][0]["id"]
        return self.model

    async def takes_images(self) -> bool:
        """Whether the model reads images; true where the server does not tell."""
        name = await self.model_name()
        rows = [row for row in (await self.get("/v1/models"))["data"] if row.get("id") == name]
        told = [row["architecture"]["input_modalities"] for row in rows if "architecture" in row]
        return not told or "image" in told[0]

    async def ask(self, path: str, body: Row, headers: Mapping[str, str]) -> Answer:
        """Stream one request, greedy, to its end."""
        dialect = "messages" if path == MESSAGES else "chat"
        assert self._session is not None
        body = {"model": await self.model_name(), "temperature": 0, "stream": True, **body}
        if dialect == "chat":
            body["stream_options"] = {"include_usage": True}
        outcome = await send(self._session, path, dialect, body, headers)
        if outcome.tokens is None or outcome.error:
            raise ProbeError(f"{self.base_url}{path} gives no whole answer: {outcome.error}")
        told = outcome.reading
        return Answer(
            outcome.tokens,
            "".join(told.text),
            "".join(told.reasoning),
            [told.calls[index] for index in sorted(told.calls)],
        )

    async def _json(
        self, method: str, path: str, body: Row | None, headers: Mapping[str, str]
    ) -> Row:
        async with self._request(method, path, body, headers) as response:
            told: Row = json.loads(b"".join([part async for part in chunks_of(response)]))
            return told

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Row | None, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer of a request that was not refused, nor redirected: it has a key."""
        assert self._session is not None
        try:
            async with self._session.request(
                method, path, json=body, headers=headers, allow_redirects=False
            ) as response:
                if response.status != 200:
                    said = (await body_of(response)).decode(errors="replace")[:ERROR_CHARS_MAX]
                    told = f"{method} {path} is answered with {response.status}: {said}"
                    raise Refused(response.status, told)
                yield response
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            raise ProbeError(
                f"{self.base_url}{path} does not answer: {type(error).__name__} {error}"
            ) from error


def counts_of(worker: Row) -> Row:
    """Return the counters in a worker's row of /v1/cache: of its cache, and of its sessions."""
    return {**(worker.get("counts") or {}), **(worker.get("sessions") or {})}


# ---------------------------------------------------------------- a session's requests


@dataclass(frozen=True, slots=True)
class Line:
    """The requests of one line of a session, oldest first."""

    session: str
    name: str
    kind: str
    requests: list[Row]


@dataclass(frozen=True, slots=True)
class Step:
    """One request of a line, held to the request before it. All in tokens."""

    line: Line
    row: Row
    reusable: int | None  # what the one before left; None where that is not known
    lost: int  # of what was kept for this line, as the server says or as the figures show
    unexplained: int  # what a told difference leaves to explain


def steps(line: Line) -> list[Step]:
    """Return what each request of `line` lost, and how much of that nobody explains."""
    found = []
    before: Row | None = None
    for row in line.requests:
        reusable, cached = None, figure(row, "cached")
        if before is not None:
            # Its last token was sampled, not read.
            reusable = figure(before, "prompt") + max(0, figure(before, "completion") - 1)
            reusable = min(reusable, figure(row, "prompt"))
        told = row.get("divergence") or {}
        lost = max(figure(told, "lost"), (reusable or 0) - cached)
        unexplained = lost
        if (told.get("cause") or "") not in _NO_CAUSES:
            # All before the difference is the same, and there is a cut within a chunk of it.
            unexplained = max(0, figure(told, "token") - CHUNK_TOKENS_MAX - cached)
        found.append(Step(line, row, reusable, lost, unexplained))
        before = row
    return found


def figure(row: Mapping[str, Any], name: str) -> int:
    """Return a number of `row`; 0 where it has none."""
    value = row.get(name)
    return value if type(value) is int else 0


async def lines_of(options: argparse.Namespace, source: str) -> list[Line]:
    """Return the lines of `source`: a file of the cache trace, else a session of the server."""
    if Path(source).is_file():
        return log_lines(Path(source))
    async with server_of(options) as server:
        return await server.lines(source)


def log_lines(path: Path) -> list[Line]:
    """Return the lines in a session's log, with what was rotated out of it before.

    Raises:
        ProbeError: it cannot be read.
    """
    older = path.with_name(path.name + ".1")
    lines: dict[tuple[str, str], Line] = {}
    for each in (older, path) if older.exists() else (path,):
        for row in _log_rows(each):
            if row.get("line") is None:  # cancelled: it is in no line
                continue
            session, name = str(row.get("session") or ""), _line_name(row)
            line = lines.setdefault((session, name), Line(session, name, row.get("kind") or "", []))
            line.requests.append(row)
    return list(lines.values())


def _line_name(row: Row) -> str:
    """Return a line's number, after its worker's where that is told: each numbers its own."""
    return f"{row['worker']}/{row['line']}" if "worker" in row else str(row.get("line"))


def _log_rows(path: Path) -> list[Row]:
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    except (OSError, ValueError) as error:
        raise ProbeError(f"{path} cannot be read: {error}") from error
    if not all(isinstance(row, dict) for row in rows):
        raise ProbeError(f"{path} is no session log: a line of it is no object")
    return rows


# ---------------------------------------------------------------- telling


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return `rows` in columns, numbers to the right, with nothing that a terminal would obey."""
    shown = [
        [f"{cell:,}" if type(cell) is int else plain(str(cell)[:CELL_CHARS_MAX]) for cell in row]
        for row in rows
    ]
    head = [plain(name[:CELL_CHARS_MAX]) for name in head]
    columns = list(zip(head, *shown, strict=True))
    widths = [max(map(len, column)) for column in columns]
    fits = [str.rjust if _is_numeric(column[1:]) else str.ljust for column in columns]
    lines = [
        "  ".join(fit(cell, width) for cell, width, fit in zip(row, widths, fits, strict=True))
        for row in (head, *shown)
    ]
    return "\n".join(line.rstrip() for line in lines)


def _is_numeric(cells: Sequence[str]) -> bool:
    return all(cell[:1].isdigit() or cell in ("-", "") for cell in cells)


def verdict(misses: Sequence[str], good: str) -> int:
    """Print the verdict; return the exit status."""
    if not misses:
        print(f"verdict: good: {good}")
        return 0
    rest = len(misses) - MISSES_TOLD_MAX
    more = f" (and {rest} more)" if rest > 0 else ""
    print(f"verdict: MISSED: {'; '.join(misses[:MISSES_TOLD_MAX])}{more}")
    return 1


# ---------------------------------------------------------------- command line


def parser_of(command: str, about: str | None) -> argparse.ArgumentParser:
    """Return the parser of `hearth COMMAND`, with the options that all probes have."""
    parser = argparse.ArgumentParser(
        prog=f"hearth {command}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:4000")
    parser.add_argument("--key", default="local")
    parser.add_argument("--model", default="", help="default the first that the server lists")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    return parser


def server_of(options: argparse.Namespace) -> Server:
    return Server(options.base_url, options.key, options.model, options.timeout)


def run(probe: Coroutine[Any, Any, int]) -> int:
    """Return the exit status of `probe`: 2 where it found nothing to judge by.

    So it is where an answer is of another form than Hearth's, which whoever reads it finds out.
    """
    try:
        return asyncio.run(probe)
    except (ProbeError, *ODD_FORM) as error:
        odd = "" if isinstance(error, ProbeError) else "the server's answer is of another form: "
        print(f"verdict: none: {odd}{plain_lines(error)}", file=sys.stderr)
        return 2
