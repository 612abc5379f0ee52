"""Runs a worker for proxies on other machines, until a signal.

    hearth worker tcp://0.0.0.0:5555
    hearth worker tcp://192.168.2.2:5555 --model mlx-community/Qwen3-8B-4bit

It listens on that address of this machine (0.0.0.0: on all of them), and hears nobody but the proxy
whose key it has: `hearth keys` says which files go where. A worker that breaks or hangs is
restarted. Settings are read as `hearth serve` reads them; the model is that of MODEL_PATH.
Exit status 0: it was ended by a signal; 1: the port is not to be had; 78: it cannot start as
configured, and a restart with the same settings would fail the same way.
"""

import argparse
import ipaddress
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hearth.commands.take_port import read_pid_file, take_port
from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.shared.paths import PROJECT_DIR, env_file
from hearth.shared.processes import PID_FILE
from hearth.shared.settings import Settings, load_settings
from hearth.shared.zmq_transport import PROXY_NAME, WORKER_NAME, curve_keys

TCP: Final = "tcp://"


@dataclass(frozen=True, slots=True)
class ListenEndpoint:
    """An address of this machine, or 0.0.0.0 for all of them, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{TCP}{self.host}:{self.port}"


def listen_endpoint(text: str) -> ListenEndpoint:
    """Parse `tcp://ADDRESS:PORT`. Raises: StartError: it is something else."""
    host, _, port = text.removeprefix(TCP).rpartition(":")
    try:
        address = ipaddress.IPv4Address(host)
        is_port = port.isascii() and port.isdigit() and 1 <= int(port) <= 65535 and port[0] != "0"
    except ValueError:
        is_port = False
    if not is_port or not text.startswith(TCP):
        raise StartError(
            f"{text!r} is nowhere to listen; allowed is tcp://ADDRESS:PORT with an IPv4 address of "
            "this machine, or 0.0.0.0 for all that it has, and a port of 1 to 65535."
        )
    return ListenEndpoint(str(address), int(port))


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hearth worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("endpoint", metavar="ENDPOINT", help="where it listens: tcp://ADDRESS:PORT")
    parser.add_argument("--model", metavar="X", help="hub id or directory (MODEL_PATH)")
    return parser.parse_args(arguments)


def variables_of(endpoint: ListenEndpoint, model: str | None) -> dict[str, str]:
    """Return what comes before the settings: this is one worker, and its port is its own.

    By PROXY_PORT it has a run directory that no other Hearth of this machine has.
    """
    if model and os.path.exists(model):
        model = os.path.abspath(model)  # the worker runs in another directory
    given = {"MODEL_PATH": model} if model is not None else {}
    return {"WORKERS": "1", "WORKER_ENDPOINTS": "", "PROXY_PORT": str(endpoint.port), **given}


def port_of(endpoint: ListenEndpoint, settings: Settings) -> str:
    """Return a sentence about the port, as `take_port` does. Raises: StartError."""
    supervisor, _ = read_pid_file(settings.instance_dir / PID_FILE)
    if supervisor and supervisor.is_running:
        raise StartError(
            f"A Hearth has port {endpoint.port} already (pid {supervisor.pid}). Stop it with: "
            f"kill {supervisor.pid}"
        )
    return take_port(endpoint.host, endpoint.port, settings.instance_dir)


def main(arguments: Sequence[str] | None = None) -> int:
    """Become the worker's supervisor, once settings and keys are good and the port is free."""
    options = options_of(arguments)
    status = EXIT_CANNOT_START
    try:
        endpoint = listen_endpoint(options.endpoint)
        os.environ.update(variables_of(endpoint, options.model))
        settings = load_settings(os.environ, env_file())
        curve_keys(settings.curve_keys_dir, WORKER_NAME, PROXY_NAME)
        status = 1
        about_port = port_of(endpoint, settings)
    except StartError as error:
        print(f"hearth worker: {error}", file=sys.stderr)
        return status
    if "freed" in about_port:
        print(about_port, file=sys.stderr, flush=True)
    os.chdir(PROJECT_DIR)
    from hearth.commands.worker.worker_host import run

    code = run(settings, str(endpoint))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the pid file and of zmq are at nothing that anybody wants


if __name__ == "__main__":
    sys.exit(main())
