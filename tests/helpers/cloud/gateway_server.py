"""Runs the real proxy with a LiteLLM config: local models here, a mock cloud there."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from hearth.shared.paths import PROJECT_DIR
from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.mock_cloud import KEY, MockCloud
from tests.helpers.servers.server import free_port
from tests.helpers.servers.watched_server import WatchedServer
from tests.helpers.worker_processes.fake_worker import MISSING

Entry = dict[str, Any]
WRONG_KEYS: Final = {  # of which groups
    "denied": "canary.literal.4711",
    "denied-env": "canary.environment.4712",
    "denied-implicit": "canary.implicit.4713",
}
PROVIDERS: Final = (  # whose clients in LiteLLM differ
    *("openai", "anthropic", "gemini", "text-completion-openai", "mistral", "deepseek"),
    *("cohere_chat", "hosted_vllm", "ollama_chat", "aiohttp_openai", "azure", "groq"),
)
STATUSES: Final = (301, 302, 303, 307, 308)
_BY_TURNS: Final = [(name, STATUSES[at % 5]) for at, name in enumerate(PROVIDERS)]
REDIRECTS: Final = [*_BY_TURNS, *((name, 307) for name, status in _BY_TURNS if status != 307)]
BIG: Final = "big"


def local(name: str, model: str) -> Entry:
    return {"model_name": name, "litellm_params": {"model": f"hearth/{model}"}}


def cloud_entry(cloud: MockCloud, name: str, model: str, **params: Any) -> Entry:
    """Return a group of one model of the mock; `model` is provider/name."""
    base = cloud.url if model.startswith("anthropic/") else f"{cloud.url}/v1"
    told = {"model": model, "api_base": base, "api_key": KEY, **params}
    return {"model_name": name, "litellm_params": told}


def write_config(directory: Path, config: Entry) -> str:
    """Write `config` as a user's YAML, which JSON is too, and return its path."""
    path = directory / "litellm.yaml"
    path.touch(0o600)
    path.write_text(json.dumps(config, indent=1))
    return str(path)


@contextmanager
def unvisited() -> Iterator[str]:
    """Give an address that nobody may connect to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


class GatewayServer(FakeServer):
    """The server that most tests of the gateway share. To `tool` its callbacks are told."""

    def __init__(self, cloud: MockCloud, tool: MockCloud) -> None:
        super().__init__(MODELS=f"second=/b, broken={MISSING}")
        self.cloud, self.tool = cloud, tool
        text = (PROJECT_DIR / "tests/data/gateway_config.yaml").read_text()
        nobody = f"http://127.0.0.1:{free_port()}"
        for word, value in (("CLOUD", cloud.url), ("TOOL", tool.url), ("NOBODY", nobody)):
            text = text.replace(f": {word}", f": {value}")
        config = yaml.safe_load(text.replace("api_key: KEY", f"api_key: {KEY}"))
        del config["params"]
        config["model_list"] += [
            cloud_entry(cloud, f"{name} {status}", f"{name}/x", api_base=f"{cloud.url}/{status}/v1")
            for name, status in REDIRECTS
        ]
        self.environment |= {
            "LITELLM_CONFIG": write_config(self.run_dir, config),
            "WRONG_KEY": WRONG_KEYS["denied-env"],
            "OPENAI_API_KEY": WRONG_KEYS["denied-implicit"],
            # LiteLLM's logger loses what comes while it sends: it sends each row at once here, and
            # tests wait for one before they cause the next.
            "DEFAULT_BATCH_SIZE": "1",
            "DEFAULT_FLUSH_INTERVAL_SECONDS": "3600",
        }

    def submits(self, after: float) -> list[dict[str, Any]]:
        """Return what the local workers were asked since `after`, in the seconds of time.time()."""
        return self.events("Submit", after) if self.worker_log.exists() else []


class TwoSidedServer(WatchedServer):
    """A scripted model BIG beside a cloud; every socket is watched."""

    def __init__(self, cloud: MockCloud) -> None:
        super().__init__()
        self.cloud = cloud
        there = {"cloud": "openai/gpt-mock", "claude-cloud": "anthropic/claude-mock"}
        entries = [cloud_entry(cloud, name, model) for name, model in there.items()]
        config = {"model_list": entries, "litellm_settings": {"num_retries": 0}}
        self.environment |= {
            "PROXY_MODEL_ID": BIG,
            "LITELLM_CONFIG": write_config(self.run_dir, config),
        }
