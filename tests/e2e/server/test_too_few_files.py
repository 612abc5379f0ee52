"""A limit on open files that is too low: what starts says so once, and what to do."""

import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hearth.shared.errors import EXIT_CANNOT_START
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.worker_files import take_reason
from hearth.shared.zmq_transport import ipc_endpoint
from scripts.fixtures.fixture_cache import fixture_dir, mlx_environment

CAP_SYS_RESOURCE, PR_CAPBSET_DROP = 24, 24
EXIT_S_MAX = 60


def held_to(files: int) -> Callable[[], None]:
    """Return what a child does before it runs: it may open so many files, and never more.

    Root's right to raise a hard limit again goes too, for all that the child runs.
    """
    drop = ctypes.CDLL(None).prctl if sys.platform == "linux" and os.geteuid() == 0 else None

    def hold() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        if drop is not None:
            assert drop(PR_CAPBSET_DROP, CAP_SYS_RESOURCE, 0, 0, 0) == 0

    return hold


def said_with(files: int, *command: str, **settings: str) -> str:
    """Start what cannot start with so few files; return what it said."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=PROJECT_DIR,
        env=mlx_environment() | settings,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=held_to(files),
        timeout=EXIT_S_MAX,
    )
    assert done.returncode == EXIT_CANNOT_START
    return done.stderr


def test_a_worker_that_may_open_too_few_files_says_so_once_and_what_to_do(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("w")
    place = directory / "w.sock"
    options = ("--worker-id", "0", "--endpoint", ipc_endpoint(place))
    kept = {"KV_CACHE_DIR": str(directory / "kv"), "LOG_ROOT": str(directory / "logs")}
    kept["MODEL_PATH"] = str(fixture_dir("qwen3"))
    errors = said_with(100, "hearth.worker.main", *options, **kept)
    for text in (errors, take_reason(place)):
        assert "100 files" in text and "ulimit" in text and "LimitNOFILE" in text, errors


def test_a_proxy_that_may_open_too_few_files_says_so_and_what_to_do(tmp_path: Path) -> None:
    errors = said_with(100, "hearth.proxy.main", RUN_DIR=str(tmp_path), PROXY_PORT="4000")
    assert "100 files" in errors and "ulimit" in errors and "LimitNOFILE" in errors
