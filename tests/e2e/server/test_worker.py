"""One worker process over its real socket, without a proxy."""

import asyncio
import contextlib
import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from hearth.shared.errors import EXIT_CANNOT_START
from hearth.shared.settings_from_env import PROJECT_DIR
from hearth.shared.start_failure_file import take_reason
from hearth.shared.wire_messages import (
    PROTOCOL_VERSION,
    Cancel,
    Count,
    Counted,
    Delta,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Prompt,
    Renew,
    Sampling,
    Submit,
    decode,
)
from hearth.shared.zmq_transport import LEASE_RENEW_S, DealerLink, ipc_endpoint
from scripts.fixtures.fixture_cache import fixture_dir, mlx_environment

Kind = TypeVar("Kind", bound=Message)
PROMPT = Prompt([{"role": "user", "content": "hello there"}])
WAIT_S = 60.0
CAP_SYS_RESOURCE, PR_CAPBSET_DROP = 24, 24
EXIT_S_MAX = 60


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A worker on the qwen3 fixture that may run two requests and keep two waiting."""
    directory = tmp_path_factory.mktemp("w")
    endpoint = ipc_endpoint(directory / "w.sock")
    settings = {"LIVE_SLOTS_MAX": "2", "QUEUE_MAX": "2", "MAX_KV_SIZE": "4096"}
    settings["KV_CACHE_DIR"] = str(directory / "kv")  # a prompt that was kept is not read
    process = subprocess.Popen(
        [sys.executable, "-m", "hearth.worker.main", "--worker-id", "3", "--endpoint", endpoint],
        cwd=PROJECT_DIR,
        env={**mlx_environment(), **settings, "MODEL_PATH": str(fixture_dir("qwen3"))},
        stdin=subprocess.PIPE,
    )
    yield endpoint
    assert process.stdin is not None
    process.stdin.close()  # as if the supervisor had died
    assert process.wait(5) == 0


class Talk:
    """A proxy's side of the conversation."""

    def __init__(self, endpoint: str) -> None:
        self._came: asyncio.Queue[bytes] = asyncio.Queue()
        self._link = DealerLink(endpoint, self._came.put_nowait)
        self.send = self._link.send

    async def __aenter__(self) -> "Talk":
        self.send(Hello(PROTOCOL_VERSION))
        while (await self.next(Heartbeat)).state != "ready":
            pass
        return self

    async def __aexit__(self, *_: object) -> None:
        self._link.close()

    @contextlib.asynccontextmanager
    async def renewing(self, name: str) -> AsyncIterator[None]:
        """Keep up the lease of a request, however long the machine takes for it."""

        async def renew() -> None:
            while True:
                self.send(Renew([name]))
                await asyncio.sleep(LEASE_RENEW_S)

        task = asyncio.create_task(renew())
        try:
            yield
        finally:
            task.cancel()

    async def next(self, *kinds: type[Kind], about: str = "") -> Kind:
        """Return the next message of these kinds, about this request if one is named."""
        async with asyncio.timeout(WAIT_S):
            while True:
                message = decode(await self._came.get())
                mine = not about or getattr(message, "request_id", "") == about
                if isinstance(message, kinds) and mine:
                    return message


def submit(name: str, tokens_max: int = 5000, prompt: Prompt = PROMPT) -> Submit:
    sampling = Sampling(max_tokens=tokens_max, temperature=0.0, repetition_penalty=1.0)
    return Submit(name, prompt, sampling)


def test_a_request_whose_lease_is_not_renewed_ends_and_a_renewed_one_goes_on(
    endpoint: str,
) -> None:
    async def talk() -> None:
        async with Talk(endpoint) as proxy:
            for name in ("forgotten", "kept"):
                proxy.send(submit(name))
            async with proxy.renewing("kept"):
                forgotten = await proxy.next(Finished, about="forgotten")
                assert forgotten.reason == "cancelled"
                await proxy.next(Delta, about="kept")
                proxy.send(Cancel("kept"))
                kept = await proxy.next(Finished, about="kept")
                assert kept.usage.completion_tokens > forgotten.usage.completion_tokens

    asyncio.run(talk())


def test_the_count_is_the_prompt_that_a_request_pays(endpoint: str) -> None:
    async def talk() -> None:
        async with Talk(endpoint) as proxy:
            proxy.send(Count("n", PROMPT))
            counted = await proxy.next(Counted)
            proxy.send(submit("r", tokens_max=1))
            assert (await proxy.next(Finished)).usage.prompt_tokens == counted.tokens
            first, second = await proxy.next(Heartbeat), await proxy.next(Heartbeat)
            assert first.model is not None
            is_cpu = first.model.backend == "cpu"  # whose slow steps are told from hangs by it
            assert (0 < first.cpu_s < second.cpu_s) == is_cpu

    asyncio.run(talk())


# ---------------------------------------------------------------- a limit on open files


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
