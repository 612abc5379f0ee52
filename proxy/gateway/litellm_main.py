"""Runs LiteLLM's process, whose standard input is a socket to the proxy.

The process ends with the socket. The proxy writes one line of JSON, the options, and reads lines
of three kinds: {"ready": true}, {"failure": why}, {"usage": CloudUsage}.
"""

import asyncio
import gc
import importlib
import os
import signal
import socket
import sys
import threading
from typing import Any, Final

import orjson

from hearth.proxy.http.event_loop import SuspendingEventLoop
from hearth.shared import logging_setup as logs

END_S_MAX: Final = 3  # time for callbacks to send what they buffer
FAILURE_CHARS_MAX: Final = 10_000  # characters of a reason with secrets; a line holds 64 KB
SERVER: Final = "hearth.proxy.gateway.litellm_server"


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:  # otherwise a callback's child would keep the socket open
        os.dup2(nothing.fileno(), 0)
    options = orjson.loads(control.makefile("rb").readline())
    logs.configure(options["log_level"].upper(), "litellm")

    def send(message: dict[str, Any]) -> None:
        control.sendall(orjson.dumps(message) + b"\n")

    threading.Thread(target=_end_with_proxy, args=(control,), daemon=True).start()
    # The user's own callbacks lie beside the user's config, which LiteLLM gets only as a copy.
    sys.path.append(options["beside"])
    gc.disable()  # collections take a quarter of the import
    try:
        server: Any = importlib.import_module(SERVER)
        with asyncio.Runner(loop_factory=SuspendingEventLoop) as runner:
            runner.run(server.serve(options, send))
    except BaseException as error:  # a config may raise anything, SystemExit too
        reason = (str(error).strip() or "no reason told").splitlines()[0].removesuffix(".")
        send({"failure": f"{type(error).__name__}: {reason[:FAILURE_CHARS_MAX]}."})
    os._exit(0)  # without waiting for threads of callbacks


def _end_with_proxy(control: socket.socket) -> None:
    """Wait until the proxy closes the socket, then end this process, at once if it still loads."""
    control.recv(1)
    signal.alarm(END_S_MAX)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
