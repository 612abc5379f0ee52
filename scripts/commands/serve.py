"""Starts the server in this process: workers, HTTP, dashboard, until a signal.

    hearth serve
    hearth serve --model mlx-community/Qwen3-8B-4bit --port 4001

Settings are read from the environment, then from .env (in the checkout that hearth runs from; in
an install here, else ~/.hearth/.env); the options come before both.
Exit status 0: it was ended by a signal; 1: the port is not to be had; 78: it cannot start as
configured, and a restart with the same settings would fail the same way.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hearth.commands.take_port import take_port
from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.shared.paths import PROJECT_DIR, env_file
from hearth.shared.settings import Settings, load_settings


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options that stand for settings."""
    parser.add_argument("--model", metavar="X", help="hub id or directory (MODEL_PATH)")
    parser.add_argument("--workers", metavar="N", help="workers to start (WORKERS)")
    parser.add_argument("--port", metavar="N", help="port to listen on (PROXY_PORT)")


def settings_of(options: argparse.Namespace) -> Settings:
    """Put `options` into the environment as the settings they stand for; return all settings.

    Raises:
        StartError: a setting is not allowed.
    """
    model = options.model
    if model and os.path.exists(model):
        model = os.path.abspath(model)  # the server may run in another directory
    given = {"MODEL_PATH": model, "WORKERS": options.workers, "PROXY_PORT": options.port}
    os.environ.update({name: text for name, text in given.items() if text is not None})
    return load_settings(os.environ, env_file())


def port_of(settings: Settings, *, is_check: bool = False) -> str:
    """Return a sentence about the port, as `take_port` does. Raises: StartError."""
    directory: Path = settings.instance_dir
    return take_port(settings.proxy_host, settings.proxy_port, directory, is_check=is_check)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hearth serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_settings(parser)
    return parser.parse_args(arguments)


def main(
    arguments: Sequence[str] | None = None, status_of: Callable[[int], int] = lambda status: status
) -> int:
    """Become the server, once its settings are good and its port is free.

    `status_of` makes the exit status of what the server, or its failed start, says.
    """
    options = options_of(arguments)
    status = EXIT_CANNOT_START
    try:
        settings = settings_of(options)
        status = 1
        about_port = port_of(settings)
    except StartError as error:
        print(error, file=sys.stderr)
        return status_of(status)
    if "freed" in about_port:
        print(about_port, file=sys.stderr, flush=True)
    os.chdir(PROJECT_DIR)
    from hearth.proxy.main import end, main as serve  # takes a second: after what may refuse

    end(status_of(serve()))


if __name__ == "__main__":
    sys.exit(main())
