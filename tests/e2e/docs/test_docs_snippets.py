"""Each snippet of the README and of docs/ runs as it stands, against one server.

A snippet that is not run says why in its document, in a comment above it. The commands of
docs/why-slow.md are held to what they show in tests/e2e/commands/test_why_slow.py.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.documents import GUIDES, ROOT, CodeBlock, SnippetShell, blocks
from tests.helpers.servers.server import Server

WAIT_S = 600.0
MODEL = "smollm2"  # whom the documents ask
SNIPPETS = [
    block
    for page in (*GUIDES, ROOT / "CONTRIBUTING.md")
    for block in blocks(page)
    if block.language in ("sh", "python")
]
RUN = [block for block in SNIPPETS if not block.not_run]
NIGHT = pytest.mark.night
BY_DAY = [
    pytest.param(block, id=str(block), marks=() if block.page.name == "README.md" else NIGHT)
    for block in RUN
]
# What a snippet is known by -> what it prints, where that is known.
SHOWS = {
    '"stream": true': ("data: [DONE]",),
    "/v1/models": ('"smollm2"',),
    "/health": ('"status":"ok"',),
    "/metrics": ("hearth_prompt_tokens_total",),
    "hearth cache": ("verdict: good",),
    "hearth eval": ("verdict: good: none of 10 answers changed",),
    "hearth keys": ("worker.key_secret", "proxy.key_secret"),
    "hearth diff-turns": ("verdict: good",),
    "/v1/cache/prefill": ('"prefilled_tokens"', '"pinned":true'),
    '"prediction": {': ('"accepted_prediction_tokens"', '"decode_forwards"'),
    '"use_kv_cache": false': ('"cache_hit":false',),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with the name of a new user's model and short answers, and a session of two turns.

    The weights are random: it answers at once, without sense.
    """
    path = str(fixture_dir("qwen3"))
    given = {"MODEL_PATH": path, "PROXY_MODEL_ID": MODEL, "DEFAULT_MAX_TOKENS": "64"}
    with Server(**given) as running:
        talk_to(running)
        yield running


def talk_to(running: Server) -> None:
    talk: list[Any] = [{"role": "user", "content": "hello, documents"}]
    for _ in range(2):
        answer = httpx.post(
            f"{running.url}/v1/chat/completions",
            json={"model": MODEL, "messages": talk, "temperature": 0},
            headers={"x-session-id": "my-session"},
            timeout=WAIT_S,
        )
        said = answer.raise_for_status().json()["choices"][0]["message"]
        talk += [said, {"role": "user", "content": "hello again"}]


@pytest.fixture(scope="module")
def shell(server: Server, tmp_path_factory: pytest.TempPathFactory) -> SnippetShell:
    return SnippetShell(server.url, server.environment, tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize("block", BY_DAY)
def test_a_snippet_runs_as_it_stands(block: CodeBlock, shell: SnippetShell) -> None:
    done = shell.run(block, WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    for known, texts in SHOWS.items():
        if known in block.text:
            assert [text for text in texts if text not in done.stdout] == [], done.stdout


def test_every_known_snippet_is_in_a_document() -> None:
    assert [known for known in SHOWS if not any(known in block.text for block in RUN)] == []
