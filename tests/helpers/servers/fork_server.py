"""Imports LiteLLM once, which takes 5 CPU seconds, and forks a proxy for each line on its stdin.

A program, run with `python -P`: it imports nothing of ours, so that a fork runs all of ours from
the first line on, and no thread runs when it forks. A line is JSON: what `python` would be given
(-m and a module, or -c and a source), the environment, and the file for stdout and stderr. The
answer is the fork's pid. It ends with its stdin.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import types
from typing import Any, Final, NoReturn

# LiteLLM's app, and what it imports late: with the first answers, which the proxy sends itself.
IMPORTED: Final = (
    "litellm.proxy.proxy_server",
    "litellm.proxy._experimental.mcp_server.mcp_server_manager",
    "litellm.proxy.anthropic_endpoints.endpoints",
    "litellm.llms.anthropic.pass_through.messages.streaming_iterator",
    "litellm.litellm_core_utils.default_encoding",
)


def serve() -> None:
    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    assert threading.active_count() == 1, threading.enumerate()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here asks how a fork ended
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            become(*json.loads(line))
        print(pid, flush=True)


def become(kind: str, what: str, environ: dict[str, str], log: str) -> NoReturn:
    """Be the process that `python kind what` would be, in a session of its own."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        redirect(log)
        os.environ.clear()
        os.environ.update(environ)
        run(kind, what)
        os._exit(0)
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def redirect(log: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for old, new in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(old, new)


def run(kind: str, what: str) -> None:
    sys.argv = [kind]
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    assert kind == "-c", kind
    sys.path.insert(0, "")
    main: Any = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(what, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    serve()
