"""Runs the real proxy with a LiteLLM config: local models here, a mock cloud there."""

import json
import os
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import anthropic

from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import Sdks
from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.mock_cloud import KEY, MockCloud
from tests.helpers.servers.scripted_server import checkpoint
from tests.helpers.servers.server import Server, free_port
from tests.helpers.servers.watched_server import WatchedServer
from tests.helpers.worker_processes.fake_worker import MISSING

Entry = dict[str, Any]
# Not of the form sk-...: LiteLLM takes such keys out of its errors by itself.
WRONG_KEYS: Final = {
    "denied": "canary.literal.4711",
    "denied-env": "canary.environment.4712",
    "denied-implicit": "canary.implicit.4713",  # which no config names, and LiteLLM takes
}
STATUSES: Final = (301, 302, 303, 307, 308)
PROVIDERS: Final = (  # whose clients in LiteLLM differ
    *("openai", "anthropic", "gemini", "text-completion-openai", "mistral", "deepseek"),
    *("cohere_chat", "hosted_vllm", "ollama_chat", "aiohttp_openai", "azure", "groq"),
)
REDIRECTS: Final = sorted(
    {(name, status) for at, name in enumerate(PROVIDERS) for status in (307, STATUSES[at % 5])}
)
BIG, SMALL = "big", "small"


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
def byte_sink() -> Iterator[tuple[str, list[bytes]]]:
    """Give the address of a port that nothing may connect to, and what came there all the same."""
    seen: list[bytes] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            seen.append(b"")
            self.request.settimeout(1.0)
            seen.append(self.request.recv(65_536))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
        server.shutdown()
        thread.join()


def _everything(cloud: MockCloud, tool: MockCloud) -> Entry:
    """Return the config of the server that most tests share: each way of failing has a group."""
    groups = {
        "cloud": "openai/gpt-mock",
        "claude-cloud": "anthropic/claude-mock",
        "text-cloud": "text-completion-openai/text-mock",
        "embed-cloud": "openai/embed-mock",
        "gemini-cloud": "gemini/gemini-mock",
        "spare": "openai/spare",
        "strict-spare": "openai/strict-spare",
        "cloud-first": "openai/flaky",
        "claude-first": "anthropic/flaky",
        "either": "openai/gpt-mock",
        "count-either": "anthropic/claude-mock",
    }
    # Per group of a local model: which.
    here = {"local-first": "local", "broken-first": "broken", "either": "local"}
    here |= {"count-first": "local", "count-broken": "broken", "count-either": "local"}
    here |= {"wild-*": "local", "lost": "broken"}
    wrong: dict[str, Any] = {"denied": WRONG_KEYS["denied"], "denied-env": "os.environ/WRONG_KEY"}
    wrong |= {"denied-implicit": None, "denied-first": WRONG_KEYS["denied"]}
    costs = {"input_cost_per_token": 1.0, "output_cost_per_token": 1.0}
    nobody = f"http://127.0.0.1:{free_port()}/v1"
    redirects = {f"{each} {status}": (each, status) for each, status in REDIRECTS}
    redirects |= {"embed": ("openai", 307), "back": ("anthropic", 307)}
    counted = ("count-first", "count-broken", "count-either")
    first = {name: ["local"] for name in ("cloud-first", "slow-first", "costly-first", "back")}
    first |= {name: ["local"] for name in ("refused-first", "denied-first", "claude-first")}
    first |= {"local-first": ["cloud"], "broken-first": ["cloud"], "lost": ["denied", "spare"]}
    first |= {name: ["claude-cloud", "cloud"] for name in counted}
    long = {"local-first": "spare", "cloud-first": "spare", "claude-first": "spare"}
    long |= {name: "claude-cloud" for name in counted}
    endpoint = {"endpoint": f"{tool.url}/callbacks", "headers": {"x-tool": "1"}}
    return {
        "model_list": [
            *(cloud_entry(cloud, name, model) for name, model in groups.items()),
            *(local(name, model) for name, model in here.items()),
            *(cloud_entry(cloud, name, "openai/denied", api_key=wrong[name]) for name in wrong),
            *(
                cloud_entry(cloud, name, f"{each}/x", api_base=f"{cloud.url}/{status}/v1")
                for name, (each, status) in redirects.items()
            ),
            cloud_entry(cloud, "slow-first", "openai/slow", timeout=1),
            cloud_entry(cloud, "costly-first", "deepseek/costly", **costs),
            cloud_entry(cloud, "priced", "openai/priced-mock", **costs),
            cloud_entry(cloud, "refused-first", "openai/refused", api_base=nobody),
        ],
        "litellm_settings": {
            "num_retries": 0,
            "callbacks": ["our_tool"],
            "fallbacks": [{name: names} for name, names in first.items()],
            "context_window_fallbacks": [{name: [other]} for name, other in long.items()],
            "content_policy_fallbacks": [{"cloud-first": ["strict-spare"]}],
        },
        "router_settings": {
            "disable_cooldowns": True,
            "provider_budget_config": {"deepseek": {"budget_limit": 0.5, "time_period": "1d"}},
        },
        "callback_settings": {"our_tool": {"callback_type": "generic_api", **endpoint}},
    }


class GatewayServer(FakeServer):
    """The server that most tests of the gateway share. To `tool` its callbacks are told."""

    def __init__(self, cloud: MockCloud, tool: MockCloud) -> None:
        super().__init__(MODELS=f"second=/b, broken={MISSING}")
        self.cloud, self.tool = cloud, tool
        self.environment |= {
            "LITELLM_CONFIG": write_config(self.run_dir, _everything(cloud, tool)),
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
    """Scripted models BIG and SMALL, each on a worker once it was asked for, beside a cloud.

    Claude's tiers are here and there; agents' MODEL is the cloud's. Every socket is watched.
    """

    def __init__(self, cloud: MockCloud) -> None:
        super().__init__(WORKERS="2")
        self.cloud = cloud
        small = checkpoint(self.run_dir / "small", self.family_name)
        there = {
            "claude-sonnet-*": "anthropic/claude-sonnet-4-6",
            "claude-3-5-haiku-*": "anthropic/claude-small-mock",
            MODEL: "openai/agent-mock",
            "cloud": "openai/gpt-mock",
            "claude-cloud": "anthropic/claude-mock",
        }
        entries = [local("claude-opus-*", BIG), local("claude-haiku-*", SMALL)]
        entries += [cloud_entry(cloud, name, model) for name, model in there.items()]
        config = {"model_list": entries, "litellm_settings": {"num_retries": 0}}
        self.environment |= {
            "PROXY_MODEL_ID": BIG,
            "MODELS": f"{SMALL}={small}",
            "LITELLM_CONFIG": write_config(self.run_dir, config),
        }


@contextmanager
def sdks_of(server: Server) -> Iterator[Sdks]:
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
    with server.openai() as gpt, claude:
        yield Sdks(server, gpt, claude)


def texts_below(*directories: os.PathLike[str]) -> str:
    """Return the text of all files below `directories`."""
    paths = (path for top in directories for path in Path(top).rglob("*") if path.is_file())
    return "\n".join(path.read_bytes().decode("utf-8", "replace") for path in paths)
