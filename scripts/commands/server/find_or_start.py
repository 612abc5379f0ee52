"""Finds the server that the settings describe, or starts one for as long as a command runs.

    with find_or_start(settings, "qwen3-8b") as server:
        ask(server.base_url, server.key, server.model)

Everything that it says goes to stderr: what a command prints is its answer.
"""

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hearth.commands.server.child_server import ChildServer
from hearth.commands.server.fetch_missing import fetch_missing
from hearth.commands.stream_client import ODD_FORM
from hearth.commands.take_port import can_listen, read_pid_file, take_port
from hearth.proxy.request.model_names import ModelNames
from hearth.shared.errors import StartError
from hearth.shared.listen_addresses import url_of
from hearth.shared.models.local_models import (
    UNKNOWN_LENGTH,
    context_tokens,
    local_models,
    matching_whole,
)
from hearth.shared.models.model_path import builtin_model, named_model
from hearth.shared.paths import env_file
from hearth.shared.processes import PID_FILE
from hearth.shared.settings import Settings, public_name

POLL_S: Final = 0.2
ANSWER_S_MAX: Final = 10.0  # for /health, which asks no worker
BEGIN_S_MAX: Final = 60.0  # until one that another command has started answers
START_S_MAX: Final = 1800.0  # until a model is loaded; hundreds of GB from a slow disk
RESTARTS_MAX: Final = 3  # of a worker that has not been ready: more would fail the same way
_ERROR_BYTES_MAX: Final = 2_000
_ANSWER_BYTES_MAX: Final = 16 << 20  # of whoever has the port
# What an answer of a program that is no Hearth comes to.
_NO_HEARTH: Final = (OSError, http.client.HTTPException, *ODD_FORM)
_SERVES: Final = {"ready", "unloaded"}  # states of a worker that the next request is answered by

Row = dict[str, Any]
Check = Callable[[str, int | None], None]  # of a model and its context, None = not told


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers now, and the model to ask it for."""

    base_url: str  # without a path
    key: str  # "" = none is needed
    model: str  # the name to send
    context_tokens: int | None  # None = another server's model, which does not tell
    takes_images: bool
    is_ours: bool  # started by this command, and ends with it


def context_in_files(source: str) -> int | None:
    """Return the context of the model that `source` names, as MODEL_PATH does; None = not told.

    A builtin model's is known before it is fetched.
    """
    try:
        named = named_model(source)
        whole = [] if isinstance(named, Path) else matching_whole(named, local_models())
        directory = named if isinstance(named, Path) else whole[0].directory
        tokens = context_tokens(json.loads((directory / "config.json").read_bytes()), None)
    except (StartError, LookupError, OSError, ValueError, AttributeError, RecursionError):
        builtin = builtin_model(source)
        return None if builtin is None else builtin.context_tokens
    return tokens if tokens < UNKNOWN_LENGTH else None


# ---------------------------------------------------------------- asking a server


class _Refused(Exception):
    """The server answered with another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Has a redirect be an error: it would take the key to another server."""

    def redirect_request(self, *_: object) -> None:
        return None


@dataclass(frozen=True, slots=True)
class _Asker:
    """Asks one server, directly: no HTTP proxy of the environment stands before this machine."""

    base_url: str
    key: str

    def get(self, path: str, body: Row | None = None, wait_s: float = ANSWER_S_MAX) -> Row:
        """Return the answer, a POST's where there is a `body`.

        Raises:
            _Refused: it is none.
            _NO_HEARTH: nobody answers, or something that is no Hearth does.
        """
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base_url + path, data, headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
        try:
            with opener.open(request, timeout=wait_s) as answer:
                told = json.loads(answer.read(_ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(_ERROR_BYTES_MAX).decode(errors="replace")
            with contextlib.suppress(*ODD_FORM):  # another program's, of any form
                text = json.loads(text)["error"]["message"]
            raise _Refused(error.code, text) from None
        if not isinstance(told, dict):
            raise ValueError("no object")
        return told

    def workers(self) -> list[Row] | None:
        """Return the workers' rows of /health; None while no Hearth answers.

        Sends no key: it may be anybody who answers.
        """
        try:
            rows = _Asker(self.base_url, "").get("/health")["workers"]
            return [{"state": row["state"], "restarts": int(row["restarts"])} for row in rows]
        except (*_NO_HEARTH, _Refused):
            return None


# ---------------------------------------------------------------- finding and starting


@contextlib.contextmanager
def find_or_start(
    settings: Settings,
    model: str = "",
    console: Console | None = None,
    check: Check = lambda _model, _context_tokens: None,
) -> Iterator[RunningServer]:
    """Give a server that serves `model` ("" = its default one), ready to be asked.

    A model that is not on this disk is fetched before a server is started with it. `check` is given
    the model and its context, None where that is not known: before it is fetched, as its files tell
    before a server is started, and as a server does before it is given. What it raises ends this.

    Raises:
        StartError: the server that runs does not serve that, or wants another key, or the one
            started here ended. The text says which, with the log's last lines.
    """
    console = console or Console(stderr=True)
    key = next(iter(settings.api_keys), "")
    found = _Asker(url_of(settings.proxy_host, settings.proxy_port), key)
    if found.workers() is not None or _begins(found, settings.instance_dir):
        _wait_until_ready(found, None, console)
        yield _checked(_server_for(found, _names_of(model, settings), is_ours=False), check)
        return
    names = ModelNames.of(settings)
    is_default = settings.model_name in (names.find_exact(model), names.find_loose(model))
    source = "" if is_default else model  # the settings name it better
    wanted = source or settings.model_path
    name = public_name(source) if source else settings.model_name

    def check_context() -> None:
        tokens = context_in_files(wanted)
        check(name, tokens and min(tokens, settings.max_kv_size))

    check_context()  # a model that is not there yet tells it where it is a builtin one
    fetch_missing(wanted, settings, console)
    check_context()
    child = _start(settings, source, console)
    asker = _Asker(url_of(settings.proxy_host, child.port), key)
    try:
        began = time.monotonic()
        if not _wait_until_ready(asker, child, console):
            yield _checked(_server_for(asker, _names_of(model, settings), is_ours=False), check)
            return
        server = _checked(_server_for(asker, (), is_ours=True), check)
        ready_s = time.monotonic() - began
        _say(console, f"The server is ready after {ready_s:.0f} s and ends with this command.")
        _say(console, "`hearth service install` keeps one running.")
        yield server
    finally:
        child.end()


def _checked(server: RunningServer, check: Check) -> RunningServer:
    check(server.model, server.context_tokens)
    return server


def _say(console: Console, text: str) -> None:
    console.print(text, style="dim", highlight=False, markup=False)


def _begins(asker: _Asker, directory: Path, *, has_lost_port: bool = False) -> bool:
    """Wait for a Hearth that has its pid file in `directory`; whether it answers then.

    `has_lost_port`: another may have taken the port just now, and writes that file in a moment.
    """
    place = urlsplit(asker.base_url)
    deadline = time.monotonic() + (BEGIN_S_MAX if has_lost_port else ANSWER_S_MAX)
    while time.monotonic() < deadline:
        supervisor, _ = read_pid_file(directory / PID_FILE)
        is_held = has_lost_port and not can_listen(place.hostname or "", place.port or 0)
        if not is_held and not (supervisor and supervisor.is_running):
            return False
        if asker.workers() is not None:
            return True
        time.sleep(POLL_S)
    return False


def _start(settings: Settings, source: str, console: Console) -> ChildServer:
    """Start a server on PROXY_PORT, or on a free port where something else has that."""
    port = settings.proxy_port
    try:
        take_port(settings.proxy_host, port, settings.instance_dir, is_check=True)
    except StartError:
        port = _free_port(settings)
        _say(console, f"Port {settings.proxy_port} is taken; the server is started on {port}.")
    directory: Path = settings.run_dir / str(port)
    return ChildServer(port, source, directory)


def _free_port(settings: Settings) -> int:
    """Raises: StartError: the next hundred ports are taken."""
    first = settings.proxy_port + 1 if settings.proxy_port < 65_000 else 4001
    for port in range(first, first + 100):
        if can_listen(settings.proxy_host, port):
            return port
    raise StartError(f"No port from {first} to {first + 99} is free. Set PROXY_PORT.")


# ---------------------------------------------------------------- waiting


def _wait_until_ready(asker: _Asker, child: ChildServer | None, console: Console) -> bool:
    """Wait until a worker serves, and show how far its load has come; whether it is the child's.

    Raises:
        StartError: it ended, or will never be ready.
    """
    deadline = time.monotonic() + START_S_MAX
    if child is None and _serves(asker.workers() or []):
        return False
    with _load_bar(console) as show:
        while not _serves(workers := asker.workers() or []) or not _is_known(child):
            if child is not None and child.exit_status is not None:
                if not _begins(asker, child.directory, has_lost_port=True):
                    raise child.failure()
                child = None  # another command was faster, and its server is waited for
            restarts = max((row["restarts"] for row in workers), default=0)
            if restarts >= RESTARTS_MAX or time.monotonic() > deadline:
                raise _never_ready(asker, child, restarts)
            step, held_mb, of_mb = ("", 0, 0) if child is None else child.loading()
            show(step, held_mb, of_mb)
            time.sleep(POLL_S)
    return child is not None


def _is_known(child: ChildServer | None) -> bool:
    """Whether it is known who answers: the child, or, where it has ended, another server."""
    if child is None:
        return True
    supervisor, _ = read_pid_file(child.directory / PID_FILE)
    return supervisor is not None and supervisor.pid == child.pid


def _serves(workers: list[Row]) -> bool:
    return any(row["state"] in _SERVES for row in workers)


def _never_ready(asker: _Asker, child: ChildServer | None, restarts: int) -> StartError:
    if child is not None:
        return child.failure()
    return StartError(
        f"The server at {asker.base_url} has no worker that is ready (restarts: {restarts}). Its "
        "log says why: `hearth service logs`, or the terminal that it was started in."
    )


@contextlib.contextmanager
def _load_bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Give what shows a step of the load, its MB and of how many; a line where no terminal is."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[megabytes]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("the server starts", total=None, megabytes="")

        def show(step: str, held_mb: int, of_mb: int) -> None:
            progress.update(
                task,
                description=f"loading: {step}" if step else "the server starts",
                total=of_mb or None,
                completed=min(held_mb, of_mb),
                megabytes=f"{held_mb:,} of {of_mb:,} MB" if of_mb else "",
            )

        yield show


# ---------------------------------------------------------------- the model


def names_served(server: RunningServer) -> list[str]:
    """Return the names that `server` lists. Raises: StartError: it does not tell."""
    with _told_as_start_errors(server.base_url):
        return [
            str(row["id"]) for row in _Asker(server.base_url, server.key).get("/v1/models")["data"]
        ]


def with_model(server: RunningServer, model: str) -> RunningServer:
    """Return `server` with the model `model`, loaded. Raises: StartError: it does not serve it."""
    asker = _Asker(server.base_url, server.key)
    return _server_for(asker, _names_of(model), is_ours=server.is_ours)


def _names_of(model: str, settings: Settings | None = None) -> tuple[str, ...]:
    """Return what a server may call `model`: a name, an alias, a hub id or a directory."""
    if not model:
        return ()
    names = [model, public_name(model)]
    if settings is not None and model == settings.model_path:
        names.append(settings.model_name)
    with contextlib.suppress(StartError):  # it may be a name that the server alone knows
        named = str(named_model(model))
        names += [named, public_name(named)]
    return tuple(names)


def _server_for(asker: _Asker, names: Sequence[str], *, is_ours: bool) -> RunningServer:
    """Return the server with the model of `names`; with its default one where there are none.

    Raises: StartError: it does not serve that, or does not take the key.
    """
    with _told_as_start_errors(asker.base_url):
        row = _row_of(asker, names)
        if row["owned_by"] == "hearth" and "context_length" not in row:
            # A count has the server load the model, which then tells its context.
            body = {"model": row["id"], "messages": [{"role": "user", "content": "?"}]}
            asker.get("/v1/messages/count_tokens", body, START_S_MAX)
            row = asker.get(f"/v1/models/{quote(row['id'], safe='/:')}")
        return RunningServer(
            asker.base_url,
            asker.key,
            str(row["id"]),
            length if type(length := row.get("context_length")) is int else None,
            "image" in row.get("architecture", {}).get("input_modalities", ()),
            is_ours,
        )


@contextlib.contextmanager
def _told_as_start_errors(base_url: str) -> Iterator[None]:
    try:
        yield
    except _Refused as refused:
        text = f"{base_url} answers with {refused.status}: {refused}"
        if refused.status in (401, 403):
            text = (
                f"The server at {base_url} answers with {refused.status}: it wants another key. "
                f"Set PROXY_API_KEY in {env_file()}, or in the environment, to one that it takes."
            )
        raise StartError(text) from None
    except _NO_HEARTH as error:
        raise StartError(
            f"{base_url} does not answer as a Hearth does: {type(error).__name__} {error}"
        ) from None


def _row_of(asker: _Asker, names: Sequence[str]) -> Row:
    """Return the row of /v1/models for the first of `names` that is served.

    Raises: StartError: none is.
    """
    rows: list[Row] = asker.get("/v1/models")["data"]
    if not names:
        return next((row for row in rows if row["owned_by"] == "hearth"), rows[0])
    for name in dict.fromkeys(names):
        with contextlib.suppress(_Refused):
            return asker.get(f"/v1/models/{quote(name, safe='/:')}")
    served = ", ".join(row["id"] for row in rows)
    port = (urlsplit(asker.base_url).port or 0) % 65_535 + 1
    raise StartError(
        f"The server at {asker.base_url} serves {served}, not {names[0]!r:.200}. Name one of "
        f"these, start that server with MODELS={names[0]:.200}, or start another one beside it, "
        f"with PROXY_PORT={port} before the command."
    )
