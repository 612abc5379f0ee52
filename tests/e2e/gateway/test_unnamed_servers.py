"""Nothing that a config does not name is reached: by a redirect, a count, a retry or a fallback.

The servers that the config names answer each request with a redirect. Where it leads, another
server keeps what comes. LiteLLM's own client of each provider asks.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import httpx
import pytest

from tests.helpers.cloud.dialect_requests import DIALECTS, ask, body_of
from tests.helpers.cloud.gateway_config import cloud_entry, local, write_config
from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.mock_cloud import KEY, MockCloud
from tests.helpers.worker_processes.fake_worker import MISSING

WAIT_S_MAX: Final = 60.0
SECRET: Final = "swordfish"
STATUSES: Final = (301, 302, 303, 307, 308)
PROVIDERS: Final = (
    *("openai", "anthropic", "gemini", "text-completion-openai", "mistral", "deepseek"),
    *("cohere_chat", "hosted_vllm", "ollama_chat", "aiohttp_openai", "azure", "groq"),
)
COUNTS: Final = ("/v1/messages/count_tokens", "/v1/responses/input_tokens")
UNREAD: Final = dict(zip(COUNTS, ("input", "messages"), strict=True))
LOCAL_GROUPS: Final = ("local-first", "broken-first", "either", "wild-card")


class Asked:
    """A server that keeps what it is asked, and answers with a redirect to `leads_to`, if any."""

    def __init__(self, leads_to: str = "") -> None:
        self.requests: list[tuple[str, bytes]] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                requests.append((self.path, str(self.headers).encode() + body))
                self.send_response(int(self.path.split("/")[1]) if leads_to else 400)
                self.send_header("location", f"{leads_to}{self.path}")
                self.send_header("content-length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        thread.start()
        yield
        self.server.shutdown()
        thread.join(WAIT_S_MAX)
        self.server.server_close()


def redirected(named: Asked, name: str, provider: str, status: int, **more: Any) -> dict[str, Any]:
    place = {"api_base": f"{named.url}/{status}/v1", "api_key": KEY}
    return {"model_name": name, "litellm_params": {"model": f"{provider}/x", **place, **more}}


class Unnamed(FakeServer):
    """Its config names `named` for all clouds, and `cloud`, which answers, for fallbacks."""

    def __init__(self, named: Asked, elsewhere: Asked, cloud: MockCloud) -> None:
        super().__init__(MODELS=f"broken={MISSING}")
        self.named, self.elsewhere, self.cloud = named, elsewhere, cloud
        entries = [
            redirected(named, f"{provider} {status}", provider, status)
            for provider in PROVIDERS
            for status in STATUSES
        ]
        entries += [
            redirected(named, "embed", "openai", 307),
            redirected(named, "back", "anthropic", 307, num_retries=1),
            cloud_entry(cloud, "cloud", "openai/gpt-mock"),
            cloud_entry(cloud, "claude", "anthropic/claude-mock"),
            local("local-first", "local"),
            local("broken-first", "broken"),
            cloud_entry(cloud, "either", "anthropic/claude-mock"),
            local("either", "local"),
            local("wild-*", "local"),
        ]
        first = {"back": ["local"], **{name: ["claude", "cloud"] for name in LOCAL_GROUPS}}
        config = {
            "model_list": entries,
            "litellm_settings": {
                "num_retries": 0,
                "fallbacks": [{name: names} for name, names in first.items()],
                "context_window_fallbacks": [{name: ["claude"]} for name in LOCAL_GROUPS],
            },
            "router_settings": {"disable_cooldowns": True},
        }
        self.environment["LITELLM_CONFIG"] = write_config(self.run_dir, config)

    def forget(self) -> None:
        self.named.requests.clear()
        self.elsewhere.requests.clear()
        self.cloud.forget()


@pytest.fixture(scope="module")
def server() -> Iterator[Unnamed]:
    elsewhere = Asked()
    named = Asked(elsewhere.url)
    with (
        elsewhere.running(),
        named.running(),
        MockCloud() as cloud,
        Unnamed(named, elsewhere, cloud) as running,
    ):
        yield running


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_redirect_takes_neither_prompt_nor_key_elsewhere(
    server: Unnamed, dialect: str, stream: bool
) -> None:
    server.forget()
    for at, provider in enumerate(PROVIDERS):
        for status in (307, STATUSES[at % len(STATUSES)]):
            body = body_of(dialect, f"{provider} {status}", SECRET, stream=stream)
            answer = ask(server.url, dialect, body)
            assert answer.status >= 400 or answer.error, (provider, answer.raw)
    asked = {path.split("/")[-1] for path, _ in server.named.requests}
    assert server.elsewhere.requests == []
    assert len(server.named.requests) > len(PROVIDERS) and asked


def test_a_redirect_of_a_count_an_embedding_or_a_retry_is_not_followed(server: Unnamed) -> None:
    server.forget()
    rows = [{"role": "user", "content": SECRET}]
    for path, model in zip(COUNTS, ("anthropic 307", "openai 307"), strict=True):
        body = {"model": model, "messages": rows, "input": SECRET}
        post(server, path, {name: body[name] for name in body if name != UNREAD[path]})
    assert post(server, "/v1/embeddings", {"model": "embed", "input": SECRET}).status_code >= 400
    answer = ask(server.url, "messages", body_of("messages", "back", "n=2"))
    assert (answer.status, answer.served_by) == (200, "hearth/local"), answer.raw
    assert len(server.named.requests) >= 2 and server.elsewhere.requests == []


@pytest.mark.parametrize("path", COUNTS)
@pytest.mark.parametrize("group", LOCAL_GROUPS)
def test_a_count_for_a_local_model_asks_no_cloud(server: Unnamed, group: str, path: str) -> None:
    server.forget()
    rows = [{"role": "user", "content": SECRET}]
    body = {"model": group, "messages": rows, "input": SECRET}
    for _ in range(4):  # a mixed group is dealt out at random
        answer = post(server, path, {name: body[name] for name in body if name != UNREAD[path]})
        assert answer.status_code == (503 if group == "broken-first" else 200), answer.text
    assert server.cloud.requests == []


def post(server: Unnamed, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=WAIT_S_MAX)
