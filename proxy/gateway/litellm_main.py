"""Starts LiteLLM's process; standard input is a socket of the proxy's, and its end ends this too.

The proxy writes one line of JSON, what to serve and how. It reads lines: {"ready": true},
{"failure": why}, {"usage": CloudUsage}.
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

END_S_MAX: Final = 3  # for callbacks to send what they hold
FAILURE_CHARS_MAX: Final = 10_000  # of a reason, secrets in it; the proxy reads lines of 64 KB
SERVER: Final = "hearth.proxy.gateway.litellm_server"


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:  # else what a callback starts would hold it open behind us
        os.dup2(nothing.fileno(), 0)
    told = orjson.loads(control.makefile("rb").readline())
    logs.configure(told["log_level"].upper(), "litellm")

    def tell(row: dict[str, Any]) -> None:
        control.sendall(orjson.dumps(row) + b"\n")

    threading.Thread(target=_end_with_proxy, args=(control,), daemon=True).start()
    # The user's own callbacks lie beside the user's file, which LiteLLM is not given.
    sys.path.append(told["beside"])
    gc.disable()  # to look through what modules make takes a quarter of the import
    try:
        server: Any = importlib.import_module(SERVER)
        with asyncio.Runner(loop_factory=SuspendingEventLoop) as runner:
            runner.run(server.serve(told, tell))
    except BaseException as error:  # a config may make it raise anything, SystemExit too
        reason = (str(error).strip() or "no reason told").splitlines()[0].removesuffix(".")
        tell({"failure": f"{type(error).__name__}: {reason[:FAILURE_CHARS_MAX]}."})
    os._exit(0)  # threads of callbacks are not waited for


def _end_with_proxy(control: socket.socket) -> None:
    """Wait for the proxy's end; then end too, at once where nothing is served yet."""
    control.recv(1)
    signal.alarm(END_S_MAX)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
